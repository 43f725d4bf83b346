"""Simulated process groups: torch's fake group of any size, and what its collectives return.

Pipeline stages, which exchange shapes with their neighbours when they are set up, do so without
them. Each context changes process-wide state of torch, and restores it on leaving.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as pipeline_schedules
from torch.library import Library
from torch.overrides import TorchFunctionMode

from shardscope._torch.dtensor import dtensor_random, forget_decisions
from shardscope._torch.fake import is_fake
from shardscope._torch.private import find_name, require
from shardscope.errors import WorldError

# Loading it registers the backend "fake".
_FAKE_GROUPS = find_name(
    "torch.testing._internal.distributed.fake_pg", "make a process group of any size"
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import FakeWork, _create_work_from_future
    from torch.distributed.tensor import _redistribute
else:
    FakeWork = find_name(
        "torch._C._distributed_c10d.FakeWork", "answer collectives on tensors without data"
    )
    _create_work_from_future = find_name(
        "torch._C._distributed_c10d._create_work_from_future",
        "return a future with its bucket to DDP",
    )
    _redistribute = find_name(
        "torch.distributed.tensor._redistribute",
        "start worlds of different ranks one after another",
    )


@contextmanager
def simulated_group(rank: int, size: int, *, backend: str) -> Iterator[None]:
    """Make this process `rank` of a fake default group of `size` until the context ends.

    `torch.distributed.get_backend` returns `backend` for it, by which torch and programs choose
    collectives.
    """
    require_fake_groups()
    tracker, excepthook = dtensor_random._rng_tracker, sys.excepthook
    level = dist.get_debug_level()
    forget_placements()
    # At level DETAIL, torch first checks each collective with the other ranks; there are none.
    dist.set_debug_level(
        min(level, dist.DebugLevel.INFO, key=lambda debug_level: debug_level.value)
    )
    try:
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=size)
        with fake_groups_only(backend):
            yield
    finally:
        dist.set_debug_level(level)
        if dist.is_initialized():  # many programs close it themselves
            dist.destroy_process_group()
        dtensor_random._rng_tracker, sys.excepthook = tracker, excepthook
        forget_placements()


def require_fake_groups() -> None:
    """Raise if this torch lacks a name that simulated process groups need."""
    require(_FAKE_GROUPS, FakeWork, _create_work_from_future, _redistribute, dtensor_random)


@contextmanager
def fake_groups_only(default_backend: str) -> Iterator[None]:
    """Create fake groups for any backend: a real group would wait for its other ranks.

    `torch.distributed.get_backend` returns the backend that was asked for. The function of the same
    name in `distributed_c10d`, which torch's own set-up calls, still returns "fake".
    """
    make_group, read_backend = distributed_c10d._new_process_group_helper, dist.get_backend
    check_ranks = dist.monitored_barrier
    backends: dict[Any, str] = {}  # by group, if it was made with a backend
    signature = inspect.signature(make_group)

    @functools.wraps(make_group)
    @functools.wraps(make_group)
    def make_fake_group(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        made = make_group(**{**arguments, "backend": "fake", "backend_options": None})
        backend = str(arguments.get("backend") or "fake")
        if backend != "fake":
            backends[made[0]] = backend
        return made

    @functools.wraps(read_backend)
    def get_backend(group: dist.ProcessGroup | None = None) -> dist.Backend:
        if read_backend(group) != "fake":
            return read_backend(group)
        return dist.Backend(backends.get(group, default_backend))

    @functools.wraps(check_ranks)
    def monitored_barrier(group: dist.ProcessGroup | None = None, *args: Any, **kwargs: Any) -> Any:
        if get_backend(group) != "gloo":
            return check_ranks(group, *args, **kwargs)  # raises
        return dist.barrier(group)

    distributed_c10d._new_process_group_helper = make_fake_group
    dist.get_backend, dist.monitored_barrier = get_backend, monitored_barrier
    try:
        yield
    finally:
        distributed_c10d._new_process_group_helper = make_group
        dist.get_backend, dist.monitored_barrier = read_backend, check_ranks


def forget_placements() -> None:
    """Clear DTensor's caches: their keys lack the rank, and shards of ranks may differ in size."""
    forget_decisions(thoroughly=True)
    for name in ("_gen_transform_infos", "get_redistribute_planner"):
        clear = getattr(getattr(_redistribute, name, None), "cache_clear", None)
        if clear is not None:
            clear()
    clear_planners = getattr(_redistribute, "clear_redistribute_planner_cache", None)
    if clear_planners is not None:
        clear_planners()


def complete_work(tensors: list[torch.Tensor]) -> Any:
    """Finished work whose future holds `tensors`; the fake group's own future holds None."""
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    return _create_work_from_future(future).boxed()


@final
class ReceivedFrom(FakeWork):
    """Finished work of a receive from any rank; `sender` is a rank of the group.

    The Python object must be kept alive: its C++ part does not know the sender.
    """

    def __init__(self, sender: int) -> None:
        super().__init__()
        self._sender = sender

    def _source_rank(self) -> int:
        return self._sender

    def is_completed(self) -> bool:
        return True


_UNANSWERED = (
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "allreduce_coalesced_",
    "gather_into_tensor_",
    "reduce_scatter_tensor_coalesced_",
)


@contextmanager
def coalesced_ops_on_fake_tensors() -> Iterator[None]:
    """Register empty kernels for ops that have none for fake tensors."""
    library = Library("c10d", "IMPL")
    destroy = library._destroy
    try:
        for name in _UNANSWERED:
            if hasattr(torch.ops.c10d, name) and not has_kernel(f"c10d::{name}", "Meta"):
                library.impl(name, _answer_nothing(name), "Meta")
        yield
    finally:
        destroy()


@contextmanager
def answered_collectives() -> Iterator[None]:
    """Fill the outputs of collectives from this rank's data, equally in every version of torch.

    Other ranks are assumed to hold the same data as this rank, and to send it what it sends.
    """
    library = Library("c10d", "IMPL")
    destroy = library._destroy
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is overridden
            for name, fill in _FILLS.items():
                for key in ("CPU", "CUDA"):
                    if has_kernel(f"c10d::{name}", key):
                        library.impl(name, _answer(name, fill), key)
        yield
    finally:
        destroy()


def _answer_nothing(name: str) -> Callable[..., Any]:
    """A kernel that leaves the outputs as they are."""
    has_outputs = len(getattr(torch.ops.c10d, name).default._schema.returns) > 1

    def answer(outputs: Any, *_: Any) -> Any:
        work = FakeWork().boxed()
        return (outputs, work) if has_outputs else work

    return answer


def _answer(name: str, fill: Callable[..., None]) -> Callable[..., Any]:
    has_outputs = len(getattr(torch.ops.c10d, name).default._schema.returns) > 1

    def answer(outputs: Any, sources: Any, group: Any, *rest: Any) -> Any:
        fill(outputs, sources, dist.ProcessGroup.unbox(group), *rest)
        work = FakeWork().boxed()
        return (outputs, work) if has_outputs else work

    return answer


def _copy(output: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the elements of `source` to `output` in order; missing ones become zero."""
    if output.shape == source.shape:
        output.copy_(source)
        return
    size = min(output.numel(), source.numel())
    filled = torch.zeros(output.numel(), dtype=output.dtype, device=output.device)
    filled[:size] = source.reshape(-1)[:size]
    output.copy_(filled.view(output.shape))


def _fill_gathered(output: torch.Tensor, source: torch.Tensor, group: Any, *_: Any) -> None:
    copies = source.reshape(-1).repeat(group.size())
    _copy(output, copies.view(output.shape) if copies.numel() == output.numel() else copies)


def _fill_gathered_lists(outputs: Any, sources: Any, group: Any, *_: Any) -> None:
    for shards, source in zip(outputs, sources, strict=False):
        for shard in shards:
            _copy(shard, source)


def _fill_scattered(output: torch.Tensor, source: torch.Tensor, group: Any, *_: Any) -> None:
    size = output.numel()
    start = group.rank() * size
    _copy(output, source.reshape(-1)[start : start + size])


def _fill_scattered_lists(outputs: Any, sources: Any, group: Any, *_: Any) -> None:
    for output, shards in zip(outputs, sources, strict=False):
        _copy(output, shards[group.rank()])


def _fill_exchanged(
    output: torch.Tensor,
    source: torch.Tensor,
    group: Any,
    output_rows: list[int],
    input_rows: list[int],
    *_: Any,
) -> None:
    parts = zip(
        _split(output, output_rows, group.size()),
        _split(source, input_rows, group.size()),
        strict=True,
    )
    for received, sent in parts:
        _copy(received, sent)


def _split(tensor: torch.Tensor, rows: list[int], size: int) -> Sequence[torch.Tensor]:
    parts: Sequence[torch.Tensor] = tensor.split(list(rows) or tensor.shape[0] // size)
    return parts


def _fill_exchanged_lists(outputs: Any, sources: Any, *_: Any) -> None:
    for output, source in zip(outputs, sources, strict=True):
        _copy(output, source)


def _fill_each(fill: Callable[..., None]) -> Callable[..., None]:
    def fill_each(outputs: Any, sources: Any, *rest: Any) -> None:
        for output, source in zip(outputs, sources, strict=True):
            fill(output, source, *rest)

    return fill_each


_FILLS: dict[str, Callable[..., None]] = {
    "_allgather_base_": _fill_gathered,
    "_reduce_scatter_base_": _fill_scattered,
    "allgather_": _fill_gathered_lists,
    "allgather_coalesced_": lambda lists, sources, *rest: _fill_gathered_lists(
        zip(*lists, strict=True), sources, *rest
    ),
    "allgather_into_tensor_coalesced_": _fill_each(_fill_gathered),
    "alltoall_": _fill_exchanged_lists,
    "alltoall_base_": _fill_exchanged,
    "gather_": _fill_gathered_lists,
    "gather_into_tensor_": _fill_gathered,
    "reduce_scatter_": _fill_scattered_lists,
    "reduce_scatter_tensor_coalesced_": _fill_each(_fill_scattered),
}


def has_kernel(op: str, key: str) -> bool:
    """Whether this torch has the op, and a kernel for it at the dispatch key."""
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op, key))
    except RuntimeError:
        return False


# torch 2.14 and newer skip the set-up in a group whose backend is called "fake".
_NOT_FAKE = "simulated"


@contextmanager
def isolated_stages(*, can_ask: bool = False) -> Iterator[None]:
    """Set up pipeline stages without messages from their neighbours until the context ends.

    With `can_ask`, stages that lack shapes ask their neighbours, which run in other processes.
    """
    schedule = pipeline_schedules._PipelineSchedule
    with ExitStack() as stack:
        for owner, name, wrap in (
            (PipelineStage, "_warmup_forward_vote", _vote_alone),  # 2.13 and 2.14
            (PipelineStage, "_warmup_backward_result", _vote_alone),  # 2.13 and 2.14
            (schedule, "_warmup_p2p", _prepare_as_real_ranks_do),  # 2.13 and 2.14
            (schedule, "_initialize_pipeline_distributed_state", _prepare_as_real_ranks_do),  # 2.15
            (PipelineStage, "_recv_meta", _refuse_to_ask),  # 2.13 and newer
            (PipelineStage, "_shape_inference", _refuse_to_infer),  # 2.11 and 2.12
        ):
            original = getattr(owner, name, None)
            is_kept = can_ask and wrap in (_refuse_to_ask, _refuse_to_infer)
            if original is not None and not is_kept:
                _replace(stack, owner, name, wrap(original))
        yield


def _replace(stack: ExitStack, owner: type, name: str, function: Any) -> None:
    holder = next(cls for cls in owner.__mro__ if name in vars(cls))
    stack.callback(setattr, holder, name, vars(holder)[name])
    setattr(holder, name, function)


def _vote_alone(original: Any) -> Any:
    def vote(stage: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = original(stage, *args, **kwargs)
        has_shapes = stage._user_meta.is_complete_for_forward()
        return torch.tensor([int(has_shapes)], dtype=result.dtype, device=result.device)

    return vote


def _prepare_as_real_ranks_do(original: Any) -> Any:
    def prepare(schedule: Any, stages: Any, *args: Any, **kwargs: Any) -> None:
        _refuse_edge_groups(stages)
        with patch.object(dist, "get_backend", lambda group=None: _NOT_FAKE), _OwnVote():
            original(schedule, stages, *args, **kwargs)

    return prepare


@final
class _OwnVote(TorchFunctionMode):
    """Returns this rank's vote for `.item()` of a fake tensor, which has no data."""

    def __init__(self) -> None:
        super().__init__()
        self._vote = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tensor:
            (self._vote,) = args[0]
        if func is torch.Tensor.item and is_fake(args[0]):
            return self._vote
        return func(*args, **(kwargs or {}))


def _refuse_edge_groups(stages: Any) -> None:
    for stage in stages:
        if getattr(stage, "p2p_per_edge", False):
            raise WorldError(
                f"Pipeline stage {stage.stage_index} needs one process group per neighbour, which "
                "torch can only split from a group with real connections; a simulated group has "
                "none. Set torch.distributed.config.pipeline_per_edge_p2p to False."
            )


def _refuse_to_ask(_: Any) -> Any:
    def receive(stage: Any, source: int) -> Any:
        raise _no_answer(stage, source, "inputs" if source < stage.stage_index else "gradients")

    return receive


def _refuse_to_infer(original: Any) -> Any:
    def infer(stage: Any, *args: Any, **kwargs: Any) -> Any:
        source = stage.stage_index - 1
        if source >= 0 and stage.stage_index_to_group_rank[source] != stage.group_rank:
            raise _no_answer(stage, source, "inputs")
        return original(stage, *args, **kwargs)

    return infer


def _no_answer(stage: Any, source: int, tensors: str) -> WorldError:
    return WorldError(
        f"Pipeline stage {stage.stage_index} infers the shapes of its {tensors} from stage "
        f"{source}, which does not run in a simulated world. Pass input_args and output_args to "
        "PipelineStage (meta tensors suffice, with requires_grad=True where gradients flow back)."
    )


@final
class _RankMap(tuple[int, ...]):
    """A tuple of ranks that meshes share, so that it is mostly compared with itself."""

    def __eq__(self, value: object) -> bool:
        return self is value or super().__eq__(value)

    def __ne__(self, value: object) -> bool:
        return not self == value

    __hash__ = tuple.__hash__


@contextmanager
def shared_rank_maps() -> Iterator[None]:
    """Make meshes that are created in the context share equal lists of ranks."""
    rank_maps: dict[_RankMap, _RankMap] = {}
    original = DeviceMesh.__init__

    def initialize(mesh: Any, *args: Any, **kwargs: Any) -> None:
        original(mesh, *args, **kwargs)
        flat = getattr(mesh, "_flatten_rank_map", None)
        if flat is not None:
            ranks = _RankMap(flat)
            mesh._flatten_rank_map = rank_maps.setdefault(ranks, ranks)

    setattr(DeviceMesh, "__init__", initialize)  # noqa: B010 - mypy has it otherwise
    try:
        yield
    finally:
        setattr(DeviceMesh, "__init__", original)  # noqa: B010
