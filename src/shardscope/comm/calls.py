"""Which module is running, and which module made an autograd node.

Each thread has a stack of module calls. Each call leaves two marks, the autograd sequence number
at its beginning and at its end; between two marks every node made on that thread is the same
module's, so a node's own number finds its module again in backward. Ordinary ops leave no mark.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right

from torch import nn

from shardscope._torch.autograd import next_sequence_number
from shardscope.comm.names import NO_MODULE, ModuleNames

__all__ = ["ModuleCalls"]


_UNWATCHED = -2


class _Marks:
    """Whose the autograd nodes of one thread are: module `owners[i]` from number `starts[i]` on."""

    __slots__ = ("owners", "stack", "starts")

    def __init__(self) -> None:
        self.stack = [NO_MODULE]
        self.starts = array("q", [-1])
        self.owners = array("q", [_UNWATCHED])

    def find(self, number: int) -> int | None:
        owner = self.owners[bisect_right(self.starts, number) - 1]
        return None if owner == _UNWATCHED else owner


class _Thread(threading.local):
    def __init__(self, register: dict[int, _Marks]) -> None:
        self.marks = register[threading.get_ident()] = _Marks()


class ModuleCalls:
    """The watcher of module calls: knows the running module and the makers of autograd nodes."""

    __slots__ = ("_find", "_marks", "_thread")

    def __init__(self, names: ModuleNames) -> None:
        self._find = names.find
        self._marks: dict[int, _Marks] = {}
        self._thread = _Thread(self._marks)

    def enter(self, module: nn.Module) -> None:
        """`module` is called on this thread."""
        marks = self._thread.marks
        stack = marks.stack
        index = self._find(module, stack[-1])
        stack.append(index)
        number = next_sequence_number()
        if marks.starts[-1] == number:
            marks.owners[-1] = index
        else:
            marks.starts.append(number)
            marks.owners.append(index)

    def exit(self, _: nn.Module) -> None:
        """The innermost call on this thread has ended."""
        marks = self._thread.marks
        stack = marks.stack
        if len(stack) > 1:  # a call that began before we watched ends without one
            stack.pop()
        number = next_sequence_number()
        if marks.starts[-1] == number:
            marks.owners[-1] = stack[-1]
        else:
            marks.starts.append(number)
            marks.owners.append(stack[-1])

    def running(self) -> int:
        """The innermost module called on this thread."""
        return self._thread.marks.stack[-1]

    def maker_of(self, number: int, thread: int) -> int | None:
        """The module that made the autograd node with this number; None if made unwatched.

        Numbers are counted by thread: `thread` called backward, and so most likely forward.
        """
        first = self._marks.get(thread)
        others = [marks for marks in self._marks.values() if marks is not first]
        makers = [marks.find(number) for marks in ([first] if first else []) + others]
        known = [maker for maker in makers if maker is not None]
        return next((maker for maker in known if maker != NO_MODULE), known[0] if known else None)
