"""Which module is running, and which module made an autograd node.

Each thread has a stack of module calls. Each call leaves two marks, the autograd sequence number
at its beginning and at its end; between two marks every node made on that thread is the same
module's, so a node's own number finds its module again in backward. Ordinary ops leave no mark.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from torch import nn
from torch.fx import GraphModule

from shardscope._torch.autograd import (
    current_node,
    is_in_backward,
    next_sequence_number,
    node_origin,
)
from shardscope._torch.modules import unwrap
from shardscope.comm.buckets import BucketBook
from shardscope.comm.names import NO_MODULE, UNNAMED, ModuleNames

__all__ = ["ModuleCalls"]


_UNWATCHED = -2


@final
class _Marks:
    """Whose the autograd nodes of one thread are: module `owners[i]` from number `starts[i]` on."""

    __slots__ = ("owners", "stack", "starts", "thread")

    def __init__(self, thread: int, *, is_new: bool) -> None:
        self.thread = thread  # its identity, which another may get when it has ended
        self.stack = [NO_MODULE]
        self.starts = array("q", [-1])
        self.owners = array("q", [NO_MODULE if is_new else _UNWATCHED])

    def mark(self, owner: int) -> None:
        self.starts.append(next_sequence_number())
        self.owners.append(owner)

    def find(self, number: int) -> int | None:
        owner = self.owners[bisect_right(self.starts, number) - 1]
        return None if owner == _UNWATCHED else owner


class _Thread(threading.local):
    def __init__(self, register: list[_Marks], old_threads: set[int]) -> None:
        identity = threading.get_ident()
        self.marks = _Marks(identity, is_new=identity not in old_threads)
        register.append(self.marks)


@final
class ModuleCalls:
    """The watcher of module calls: knows the running module and the makers of autograd nodes."""

    __slots__ = (
        "_buckets",
        "_marks",
        "_names",
        "_old_threads",
        "_only_places",
        "_report_gap",
        "_thread",
        "num_forwards",
    )

    def __init__(
        self, names: ModuleNames, buckets: BucketBook, report_gap: Callable[[str, str], None]
    ) -> None:
        self._names = names
        self._only_places = names.only_places
        self._buckets = buckets
        self._report_gap = report_gap
        self.num_forwards: dict[int, int] = {}  # calls of modules that no other module called
        self._marks: list[_Marks] = []
        # Threads that may have made nodes while nobody watched.
        self._old_threads: set[int] = set()
        self._note_old_threads()
        self._thread = _Thread(self._marks, self._old_threads)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Until the context ends, what this thread makes outside of modules is no module's."""
        self._note_old_threads()
        marks = self._thread.marks
        marks.mark(marks.stack[-1])
        try:
            yield
        finally:
            marks.mark(_UNWATCHED)

    def _note_old_threads(self) -> None:
        self._old_threads.update(thread.ident or 0 for thread in threading.enumerate())

    def enter(self, module: nn.Module) -> None:
        """`module` is called on this thread."""
        marks = self._thread.marks
        index = self._only_places.get(id(module))
        if index is None:
            index = self._find(module, marks.stack[-1])
        if marks.stack[-1] == NO_MODULE and index >= 0 and not is_in_backward():
            self.num_forwards[index] = self.num_forwards.get(index, 0) + 1
        marks.stack.append(index)
        number = next_sequence_number()
        starts = marks.starts
        if starts[-1] == number:
            marks.owners[-1] = index
        else:
            starts.append(number)
            marks.owners.append(index)

    def _find(self, module: nn.Module, caller: int) -> int:
        try:
            is_graph = isinstance(unwrap(module), GraphModule)
            if caller == NO_MODULE and is_in_backward() and not is_graph:
                caller = self.recomputing()
            return self._names.find(module, caller)
        except Exception as error:  # noqa: BLE001 - watching must not kill
            self._report_gap(type(module).__name__, f"a module could not be named ({error!r})")
            return UNNAMED

    def exit(self, module: nn.Module) -> None:
        """The innermost call on this thread, of `module`, has ended."""
        if self._names.has_data_parallel:
            self._buckets.exit(module)
        marks = self._thread.marks
        stack = marks.stack
        if len(stack) > 1:  # a call that began before we watched ends without one
            stack.pop()
        number = next_sequence_number()
        starts = marks.starts
        if starts[-1] == number:
            marks.owners[-1] = stack[-1]
        else:
            starts.append(number)
            marks.owners.append(stack[-1])

    def recomputing(self) -> int:
        """The module whose node is at work: it is, or it called, what is now run again."""
        node = current_node()
        origin = None if node is None else node_origin(node)
        if not isinstance(origin, int):
            return NO_MODULE
        own = threading.get_ident()
        # The engine's own threads, which Python has not started, made no node of the forward's.
        is_engines = all(thread.ident != own for thread in threading.enumerate())
        reached = None if is_engines else next_sequence_number()
        maker = self.maker_of(origin, 0 if is_engines else own, reached=reached)
        return NO_MODULE if maker is None else maker

    def running(self) -> int:
        """The innermost module called on this thread."""
        return self._thread.marks.stack[-1]

    def maker_of(self, number: int, thread: int, *, reached: int | None = None) -> int | None:
        """The module that made the autograd node with this number; None if made unwatched.

        Numbers are counted by thread: `thread` called backward, and so most likely forward; it had
        `reached` a number by then. Where it may have made the node outside of any module, and
        another thread in one, nobody knows.
        """
        claims: set[int] = set()
        others: set[int] = set()
        for marks in tuple(self._marks):
            maker = marks.find(number)
            if maker is not None:
                (claims if marks.thread == thread else others).add(maker)
        modules, others = claims - {NO_MODULE}, others - {NO_MODULE}
        if len(modules) == 1:
            return modules.pop()
        if not modules and not others:
            return None if thread in self._old_threads and not claims else NO_MODULE
        is_anothers = thread == 0 or (reached is not None and number >= reached)
        if not modules and len(others) == 1 and is_anothers:
            return others.pop()
        self._report_gap(
            "backward",
            "forwards ran on several threads, so collectives that only autograd could "
            "attribute have no module",
        )
        return NO_MODULE
