"""A process group whose ranks are threads of this process.

Implements the methods that torch calls, under their names in each version. An `Exchange` computes
the results.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol, final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardscope._torch.fake import FakeTensorMode
from shardscope._torch.private import find_name
from shardscope._torch.process_groups.collective_semantics import (
    CollectiveRequest,
    name_reduction,
    read_factor,
)
from shardscope._torch.process_groups.simulated import forget_placements
from shardscope._torch.training_hooks import report_collective

_create_work_from_future = find_name(
    "torch._C._distributed_c10d._create_work_from_future",
    "return futures from collectives of threaded ranks",
)
_set_thread_isolation_mode = find_name(
    "torch._C._distributed_c10d._set_thread_isolation_mode",
    "give each threaded rank its own process groups",
)

# By this name meshes recognise threaded ranks, and keep meshes of different threads apart.
_NAME = "threaded"
OWN = "shardscope: "
"""The prefix of descriptions of shardscope's own groups; the rest is their purpose."""


class GroupKey(NamedTuple):
    """The identity of a group, equal on all its ranks."""

    name: str
    ranks: tuple[int, ...]  # global ranks, in the group's order

    def describe(self) -> str:
        return f"the group of rank {', '.join(map(str, self.ranks))}"


class Exchange(Protocol):
    """Runs collectives and messages between threaded ranks; ranks are those of the group."""

    def join(self, group: GroupKey, rank: int, request: CollectiveRequest) -> None:
        """Join a collective; returns when its outputs are filled."""

    def send(self, group: GroupKey, rank: int, to: int, tag: int, tensor: torch.Tensor) -> None:
        """Send a tensor to another rank, without waiting."""

    def receive(
        self, group: GroupKey, rank: int, sender: int | None, tag: int
    ) -> tuple[int, torch.Tensor]:
        """Wait for a tensor, from any rank if `sender` is None; returns the sender too."""


# torch's stubs have the methods to call, not those to override.
_ProcessGroup: Any = dist.ProcessGroup


@final
class _Group(_ProcessGroup):  # type: ignore[misc]
    """A group as seen by one rank. Collectives, also asynchronous ones, complete when called."""

    def __init__(self, rank: int, key: GroupKey, exchange: Exchange) -> None:
        super().__init__(rank, len(key.ranks))
        self._own_rank = rank
        self._key = key
        self._exchange = exchange
        self._posted: list[_Receipt] = []  # receives that may not have been waited for

    def size(self) -> int:
        return len(self._key.ranks)

    @property
    def group_name(self) -> str:
        return self._key.name

    @property
    def pg_name(self) -> str:
        return self._key.name

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return _NAME

    def name(self) -> str:
        return _NAME

    def _get_backend(self, device: Any) -> Any:
        """The group itself, which torch queries for optional features: it has none."""
        return self

    supports_coalescing = supports_splitting = False

    def __repr__(self) -> str:
        return f"<rank {self._own_rank} of {self._key.describe()}>"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors = _listed(tensors)
        op = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
        return self._join("all_reduce", tensors, tensors, **_name_op(op))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any) -> Any:
        return self._join("reduce", tensors, tensors, root=opts.rootRank, **_name_op(opts.reduceOp))

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        tensors = _listed(tensors)
        return self._join("broadcast", tensors, tensors, root=opts.rootRank)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._join(
            "all_gather", inputs, [tensor for tensors in outputs for tensor in tensors]
        )

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self.allgather(outputs, inputs)

    def all_gather_single(self, output: Any, source: Any, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [source])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        spread = [_chunk(output, self.size()) for output in outputs]
        return self.allgather(spread, inputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        spread = [tensor for tensors in outputs for tensor in tensors]
        return self._join("gather", inputs, spread, root=opts.rootRank)

    def gather_single(self, output: Any, source: Any, opts: Any) -> Any:
        is_root = self._own_rank == opts.rootRank
        return self.gather([_chunk(output, self.size())] if is_root else [], [source], opts)

    gather_into_tensor = gather_single

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        spread = [tensor for tensors in inputs for tensor in tensors]
        return self._join("scatter", spread, outputs, root=opts.rootRank)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        spread = [tensor for tensors in inputs for tensor in tensors]
        return self._join("reduce_scatter", spread, outputs, **_name_op(opts.reduceOp))

    def reduce_scatter_single(self, output: Any, source: Any, opts: Any) -> Any:
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self.reduce_scatter(
            outputs, [_chunk(source, self.size()) for source in inputs], opts
        )

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._join("all_to_all", inputs, outputs)

    def all_to_all_single(
        self,
        output: Any,
        source: Any,
        output_splits: Any = None,
        input_splits: Any = None,
        opts: Any = None,
    ) -> Any:
        return self._join(
            "all_to_all_single",
            [source],
            [output],
            output_splits=tuple(output_splits or ()),
            input_splits=tuple(input_splits or ()),
        )

    def barrier(self, opts: Any = None) -> Any:
        return self._join("barrier", [], [])

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        self._join("barrier", [], [])

    def send(self, tensors: Any, to: int, tag: int = 0) -> Any:
        self._exchange.send(self._key, self._own_rank, to, tag, tensors[0].detach().clone())
        return _finished(tensors)

    def recv(self, tensors: Any, sender: int, tag: int = 0) -> Any:
        return self._post(lambda: self._receive(tensors[0], sender, tag), sender, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self._post(lambda: self._receive(tensors[0], None, tag), None, tag)

    # torch 2.11's names for the same.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _start_coalescing(self, *_: Any) -> None:
        """Collectives are not coalesced."""

    def _end_coalescing(self, *_: Any) -> Any:
        return _finished([])

    def _post(self, receive: Callable[[], int], sender: int | None, tag: int) -> _Receipt:
        """A receive after those posted before it, which take the messages that arrive first."""
        self._posted = [receipt for receipt in self._posted if not receipt.is_completed()]
        earlier = [
            receipt
            for receipt in self._posted
            if receipt.tag == tag and (None in (sender, receipt.sender) or sender == receipt.sender)
        ]
        receipt = _Receipt(receive, sender, tag, earlier)
        self._posted.append(receipt)
        return receipt

    def _receive(self, tensor: torch.Tensor, sender: int | None, tag: int) -> int:
        source, sent = self._exchange.receive(self._key, self._own_rank, sender, tag)
        with torch.no_grad():
            tensor.detach().copy_(sent.reshape(tensor.shape))
        report_collective("receive", [sent], [tensor])
        return source

    def _join(
        self,
        kind: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        **more: Any,
    ) -> Any:
        purpose = self.group_desc.removeprefix(OWN) if self.group_desc.startswith(OWN) else ""
        request = CollectiveRequest(kind, inputs, outputs, purpose=purpose, **more)
        self._exchange.join(self._key, self._own_rank, request)
        if not purpose:
            report_collective(kind, inputs, outputs)
        return _finished(outputs)


@final
class _Receipt(dist.Work):
    """A receive that runs in `wait()`: both ranks may post receives before either sends.

    Those of `earlier`, which may take the same messages, run first.
    """

    def __init__(
        self,
        receive: Callable[[], int],
        sender: int | None,
        tag: int,
        earlier: Sequence[_Receipt],
    ) -> None:
        super().__init__()
        self.sender, self.tag = sender, tag
        self._earlier = earlier
        self._receive: Callable[[], int] | None = receive
        self._sender = -1

    def wait(self, *_: Any) -> bool:
        for receipt in self._earlier:
            receipt.wait()
        self._earlier = ()
        if self._receive is not None:
            receive, self._receive = self._receive, None
            self._sender = receive()
        return True

    def is_completed(self) -> bool:
        return self._receive is None

    def _source_rank(self) -> int:
        return self._sender


def _name_op(op: Any) -> dict[str, Any]:
    return {"reduction": name_reduction(op), "factor": read_factor(op)}


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _chunk(tensor: torch.Tensor, num_ranks: int) -> list[torch.Tensor]:
    """Equal chunks along the first dim, as views if possible."""
    rows = tensor.detach().reshape(num_ranks, -1) if tensor.numel() else None
    return [tensor.detach()] * num_ranks if rows is None else list(rows.unbind())


def _finished(tensors: Sequence[torch.Tensor]) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(list(tensors))
    return _create_work_from_future(future)


@contextmanager
def joined_world(rank: int, size: int, store: Any) -> Iterator[None]:
    """Make this thread rank `rank` of a world until the context ends."""
    dist.init_process_group(_NAME, store=store, rank=rank, world_size=size)
    try:
        yield
    finally:
        if dist.is_initialized():  # many programs close it themselves
            dist.destroy_process_group()


@contextmanager
def threaded_backend(exchange: Exchange) -> Iterator[Any]:
    """Run groups of any backend on `exchange`, with threads as ranks, until the context ends.

    Yields the store with which ranks join the world. All changes to torch are undone.
    """
    level, excepthook = dist.get_debug_level(), sys.excepthook
    forget_placements()
    # Without a GPU, torch 2.11 for CUDA keeps state of the first thread that enters this mode,
    # and uses it after that thread has ended.
    with FakeTensorMode():
        pass
    with ExitStack() as stack:
        stack.callback(forget_placements)
        stack.callback(setattr, sys, "excepthook", excepthook)
        stack.callback(dist.set_debug_level, level)
        # At level DETAIL, torch wraps groups in groups with collectives of their own.
        dist.set_debug_level(
            min(level, dist.DebugLevel.INFO, key=lambda debug_level: debug_level.value)
        )
        stack.enter_context(_registered(exchange))
        stack.enter_context(_forced_backend())
        stack.callback(_set_thread_isolation_mode, False)
        _set_thread_isolation_mode(True)
        yield dist.HashStore()


_REGISTRIES = (
    "backend_list",
    "backend_capability",
    "backend_type_map",
    "default_device_backend_map",
)


@contextmanager
def _registered(exchange: Exchange) -> Iterator[None]:
    backend: Any = dist.Backend
    saved = {name: getattr(backend, name).copy() for name in (*_REGISTRIES, "_plugins")}
    has_name = hasattr(backend, _NAME.upper())

    def make(options: Any, _: Any = None) -> _Group:
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        return _Group(options.group_rank, GroupKey(options.group_id, ranks), exchange)

    try:
        backend.register_backend(_NAME, make, extended_api=True, devices=["cpu", "cuda", "meta"])
        yield
    finally:
        for name, value in saved.items():
            setattr(backend, name, value)
        if not has_name:
            delattr(backend, _NAME.upper())


@contextmanager
def _forced_backend() -> Iterator[None]:
    """Create new groups with our backend, whichever is requested, without a barrier."""
    make_group = distributed_c10d._new_process_group_helper
    barrier = distributed_c10d._store_based_barrier
    signature = inspect.signature(make_group)

    def make_ours(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        return make_group(**{**arguments, "backend": _NAME, "backend_options": None})

    distributed_c10d._new_process_group_helper = make_ours
    distributed_c10d._store_based_barrier = lambda *_, **__: None
    try:
        yield
    finally:
        distributed_c10d._new_process_group_helper = make_group
        distributed_c10d._store_based_barrier = barrier
