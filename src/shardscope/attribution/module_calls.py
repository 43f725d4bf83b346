"""Which module is running, which module created an autograd node, and which parameters a DDP
bucket holds.
"""

from __future__ import annotations

import threading
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel

from shardscope._torch.autograd import (
    current_node,
    is_in_backward,
    next_sequence_number,
    node_origin,
)
from shardscope._torch.ddp import Bucket, has_final_buckets, read_buckets
from shardscope._torch.modules import unwrap
from shardscope.attribution.module_names import NO_MODULE, UNNAMED, ModuleNames
from shardscope.record import BucketReduce


@final
class _ModuleBuckets:
    """The buckets of a DDP module, and which of them was reduced last in this backward."""

    __slots__ = ("_by_size", "_parameter_ids", "last", "module", "records", "reducer_id")

    def __init__(self, module: weakref.ref[DistributedDataParallel]) -> None:
        self.module = module
        self.last = -1
        self.records: dict[int, BucketReduce] = {}  # by index
        self.reducer_id: int | None = None  # of a reducer whose buckets are final
        self._parameter_ids: set[int] = set()
        self._by_size: dict[int, list[Bucket]] = {}

    def read(self, module: DistributedDataParallel) -> None:
        """Read the current buckets, unless they are known and final."""
        if self.reducer_id == id(module.reducer) and has_final_buckets(module):
            return
        self.reducer_id = None
        buckets = sorted(read_buckets(module), key=lambda bucket: bucket.index)
        self.records = {}
        self._parameter_ids = {id(member) for bucket in buckets for member in bucket.parameters}
        by_size: dict[int, list[Bucket]] = {}
        for bucket in buckets:
            by_size.setdefault(bucket.num_elements, []).append(bucket)
        self._by_size = by_size
        if has_final_buckets(module):
            self.reducer_id = id(module.reducer)

    def find_due(self, num_elements: int, parameter: torch.Tensor | None) -> Bucket | None:
        """The bucket of this size that is reduced next, if the parameter is in any bucket."""
        if parameter is not None and id(parameter) not in self._parameter_ids:
            return None
        fitting = self._by_size.get(num_elements)
        if fitting is None:
            return None
        return next((bucket for bucket in fitting if bucket.index > self.last), fitting[0])


@final
class BucketRegistry:
    """The gradient buckets of DDP modules, read after a forward until they are final."""

    def __init__(self, names: ModuleNames, report_gap: Callable[[str, str], None]) -> None:
        self._names = names
        self._report_gap = report_gap
        self._modules: dict[int, _ModuleBuckets] = {}  # by the id of a module that is alive

    def exit(self, module: nn.Module) -> None:
        """Read the buckets of `module`, if it is a DDP module whose forward has ended."""
        if isinstance(module, DistributedDataParallel) and not is_in_backward():
            buckets = self._modules.get(id(module))
            if buckets is None:
                buckets = self._add(module)
            try:
                buckets.read(module)
            except Exception as error:  # noqa: BLE001 - tracing must not fail the run
                self._report_gap("DDP", f"its buckets could not be read ({error})")
            buckets.last = -1

    def _add(self, module: DistributedDataParallel) -> _ModuleBuckets:
        key, modules = id(module), self._modules
        modules[key] = _ModuleBuckets(weakref.ref(module, lambda _: modules.pop(key, None)))
        return modules[key]

    def find(self, num_elements: int, parameter: torch.Tensor | None) -> BucketReduce | None:
        """The bucket that `find_bucket` returns, as a record with the names of its parameters."""
        found = self._find_due(num_elements, parameter)
        if found is None:
            return None
        buckets, bucket = found
        buckets.last = bucket.index
        record = buckets.records.get(bucket.index)
        if record is None:
            names = self._parameter_names(bucket)
            record = BucketReduce(bucket=bucket.index, parameters=names)
            buckets.records[bucket.index] = record
        return record

    def repeats(
        self, record: BucketReduce, num_elements: int, parameter: torch.Tensor | None
    ) -> bool:
        """Whether `find` would return this same record; if so, the bucket is reduced now."""
        found = self._find_due(num_elements, parameter)
        if found is None:
            return False
        buckets, bucket = found
        if buckets.records.get(bucket.index) is not record:
            return False
        buckets.last = bucket.index
        return True

    def find_bucket(self, num_elements: int, parameter: torch.Tensor | None) -> Bucket | None:
        """The bucket of this size that is reduced next.

        `parameter` is the one whose gradient completed the bucket; None at the end of backward.
        """
        found = self._find_due(num_elements, parameter)
        if found is None:
            return None
        buckets, bucket = found
        buckets.last = bucket.index
        return bucket

    def _find_due(
        self, num_elements: int, parameter: torch.Tensor | None
    ) -> tuple[_ModuleBuckets, Bucket] | None:
        for buckets in tuple(self._modules.values()):
            bucket = buckets.find_due(num_elements, parameter)
            if bucket is not None:
                return buckets, bucket
        return None

    def _parameter_names(self, bucket: Bucket) -> tuple[str, ...]:
        names = (self._names.parameter_name(parameter) for parameter in bucket.parameters)
        return tuple(name if name is not None else "?" for name in names)


def common_module(names: Sequence[str]) -> str:
    """The innermost module that contains all of the parameters or modules with these names."""
    paths = [name.split(".")[:-1] for name in names]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


_UNTRACKED = -2
_MAX_MARKS = 2**20  # of a thread: forwards before that are over, as far as backward is concerned


@final
class _NodeCreators:
    """The modules that created the autograd nodes of one thread.

    Nodes with sequence numbers from `starts[i]` on were created by module `owners[i]`.
    """

    __slots__ = ("owners", "stack", "starts", "thread")

    def __init__(self, thread: int, *, is_new: bool) -> None:
        self.thread = thread  # its id, which may be reused after the thread has ended
        self.stack = [NO_MODULE]
        self.starts = array("q", [-1])
        self.owners = array("q", [NO_MODULE if is_new else _UNTRACKED])

    def add(self, owner: int) -> None:
        self.starts.append(next_sequence_number())
        self.owners.append(owner)

    def forget_oldest(self) -> None:
        """Drop the older half of the marks, of forwards whose backward is over in most programs."""
        num_dropped = len(self.starts) // 2
        del self.starts[:num_dropped], self.owners[:num_dropped]
        self.starts[0], self.owners[0] = -1, _UNTRACKED

    def find(self, number: int) -> int | None:
        owner = self.owners[bisect_right(self.starts, number) - 1]
        return None if owner == _UNTRACKED else owner


class _Thread(threading.local):
    def __init__(self, register: list[_NodeCreators], old_threads: set[int]) -> None:
        identity = threading.get_ident()
        self.creators = _NodeCreators(identity, is_new=identity not in old_threads)
        register.append(self.creators)


@final
class ModuleCalls:
    """Observes module calls: the running module, and the creators of autograd nodes."""

    __slots__ = (
        "_buckets",
        "_creators",
        "_names",
        "_old_threads",
        "_report_gap",
        "_thread",
        "_unique_index",
        "num_forwards",
    )

    def __init__(
        self, names: ModuleNames, buckets: BucketRegistry, report_gap: Callable[[str, str], None]
    ) -> None:
        self._names = names
        self._unique_index = names.unique_index
        self._buckets = buckets
        self._report_gap = report_gap
        self.num_forwards: dict[int, int] = {}  # calls that are not made by another module
        self._creators: list[_NodeCreators] = []
        # Threads that may have created nodes before module calls were observed.
        self._old_threads: set[int] = set()
        self._note_old_threads()
        self._thread = _Thread(self._creators, self._old_threads)

    @contextmanager
    def marking_threads(self) -> Iterator[None]:
        """Until the context ends, nodes that this thread creates outside modules have no owner."""
        self._note_old_threads()
        creators = self._thread.creators
        creators.add(creators.stack[-1])
        try:
            yield
        finally:
            creators.add(_UNTRACKED)

    def _note_old_threads(self) -> None:
        self._old_threads.update(thread.ident or 0 for thread in threading.enumerate())

    def enter(self, module: nn.Module) -> None:
        """Note that a call of `module` begins on this thread."""
        creators = self._thread.creators
        index = self._unique_index.get(id(module))
        if index is None:
            index = self._find(module, creators.stack[-1])
        if creators.stack[-1] == NO_MODULE and index >= 0 and not is_in_backward():
            self.num_forwards[index] = self.num_forwards.get(index, 0) + 1
        creators.stack.append(index)
        number = next_sequence_number()
        starts = creators.starts
        if starts[-1] == number:
            creators.owners[-1] = index
        else:
            starts.append(number)
            creators.owners.append(index)

    def _find(self, module: nn.Module, caller: int) -> int:
        try:
            is_graph = isinstance(unwrap(module), GraphModule)
            if caller == NO_MODULE and is_in_backward() and not is_graph:
                caller = self.recomputing()
            return self._names.find(module, caller)
        except Exception as error:  # noqa: BLE001 - tracing must not fail the run
            self._report_gap(type(module).__name__, f"a module could not be named ({error!r})")
            return UNNAMED

    def exit(self, module: nn.Module) -> None:
        """Note that the innermost call on this thread, of `module`, has ended."""
        if self._names.has_data_parallel:
            self._buckets.exit(module)
        creators = self._thread.creators
        stack = creators.stack
        if len(stack) > 1:  # empty for a call that began before module calls were observed
            stack.pop()
        number = next_sequence_number()
        starts = creators.starts
        if starts[-1] == number:
            creators.owners[-1] = stack[-1]
        else:
            starts.append(number)
            creators.owners.append(stack[-1])
            if len(starts) > _MAX_MARKS:
                creators.forget_oldest()

    def recomputing(self) -> int:
        """The module whose autograd node is running: the recomputed module, or its caller."""
        node = current_node()
        origin = None if node is None else node_origin(node)
        if not isinstance(origin, int):
            return NO_MODULE
        own = threading.get_ident()
        # Threads of the autograd engine, which Python did not start, create no forward nodes.
        is_engine_thread = all(thread.ident != own for thread in threading.enumerate())
        reached = None if is_engine_thread else next_sequence_number()
        creator = self.creator_of(origin, 0 if is_engine_thread else own, reached=reached)
        return NO_MODULE if creator is None else creator

    def running(self) -> int:
        """The innermost module called on this thread."""
        return self._thread.creators.stack[-1]

    def caller(self) -> int:
        """The module that called the innermost module called on this thread, or NO_MODULE."""
        stack = self._thread.creators.stack
        return stack[-2] if len(stack) > 1 else NO_MODULE

    def creator_of(self, number: int, thread: int, *, reached: int | None = None) -> int | None:
        """The module that created the autograd node with this number; None if not observed.

        Each thread counts its own numbers. `thread` called backward, and so most likely forward,
        and was at number `reached` by then. It is a gap if several modules may have created the
        node: this thread outside any module, and another thread inside one.
        """
        if len(self._creators) == 1 and self._creators[0].thread == thread:
            creator = self._creators[0].find(number)
            if creator is not None:
                return creator
        claims: set[int] = set()
        other_creators: set[int] = set()
        for creators in tuple(self._creators):
            creator = creators.find(number)
            if creator is not None:
                (claims if creators.thread == thread else other_creators).add(creator)
        modules, other_creators = claims - {NO_MODULE}, other_creators - {NO_MODULE}
        if len(modules) == 1:
            return modules.pop()
        if not modules and not other_creators:
            return None if thread in self._old_threads and not claims else NO_MODULE
        is_on_other_thread = thread == 0 or (reached is not None and number >= reached)
        if not modules and len(other_creators) == 1 and is_on_other_thread:
            return other_creators.pop()
        self._report_gap(
            "backward",
            "forwards ran on several threads, so collectives that only autograd could "
            "attribute have no module",
        )
        return NO_MODULE
