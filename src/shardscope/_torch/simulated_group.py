"""torch's fake process group, and the process-wide state that a world must put back as it was."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.library import Library, get_kernel

from shardscope._torch.dispatch import without_modes
from shardscope._torch.fakes import NO_DATA
from shardscope._torch.logs import FAKE_TENSOR_LOG
from shardscope._torch.private import find_name, require
from shardscope._torch.propagation import dtensor_random, forget_decisions
from shardscope.errors import ShardscopeError

__all__ = [
    "ReceivedFrom",
    "coalesced_ops_on_fake_tensors",
    "complete_work",
    "empty_fakes",
    "explained_lack_of_data",
    "fake_tensors",
    "forget_placements",
    "meshes_with_data",
    "simulated_group",
    "uncopied_mismatches",
]

# It registers the backend "fake" when it is loaded.
_FAKE_GROUPS = find_name(
    "torch.testing._internal.distributed.fake_pg", "make a process group of any size"
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import FakeWork, _create_work_from_future
    from torch._subclasses import fake_tensor
    from torch._subclasses.fake_tensor import FakeTensor as _FakeTensor
    from torch.distributed.tensor import _redistribute
else:
    FakeWork = find_name(
        "torch._C._distributed_c10d.FakeWork", "answer collectives on tensors without data"
    )
    _create_work_from_future = find_name(
        "torch._C._distributed_c10d._create_work_from_future",
        "give DDP a future that holds its bucket",
    )
    fake_tensor = find_name("torch._subclasses.fake_tensor", "give models shapes without data")
    _FakeTensor = find_name("torch._subclasses.fake_tensor.FakeTensor", "tell tensors without data")
    _redistribute = find_name(
        "torch.distributed.tensor._redistribute", "let worlds of other ranks follow one another"
    )


@contextmanager
def simulated_group(rank: int, size: int) -> Iterator[None]:
    """Make this process `rank` of a fake default group of `size`; leave nothing behind."""
    require(_FAKE_GROUPS, FakeWork, _create_work_from_future, _redistribute, dtensor_random)
    tracker, excepthook = dtensor_random._rng_tracker, sys.excepthook
    level = dist.get_debug_level()
    forget_placements()
    # In detail, torch checks each collective with the other ranks first, and there are none.
    dist.set_debug_level(min(level, dist.DebugLevel.INFO, key=lambda one: one.value))
    try:
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=size)
        with _only_fake_groups():
            yield
    finally:
        dist.set_debug_level(level)
        if dist.is_initialized():  # many programs close it themselves
            dist.destroy_process_group()
        dtensor_random._rng_tracker, sys.excepthook = tracker, excepthook
        forget_placements()


@contextmanager
def _only_fake_groups() -> Iterator[None]:
    """Simulate further groups of any backend: a real one would wait for its other ranks."""
    make_group = distributed_c10d._new_process_group_helper

    signature = inspect.signature(make_group)

    def make_fake_group(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        return make_group(**{**arguments, "backend": "fake", "backend_options": None})

    distributed_c10d._new_process_group_helper = make_fake_group
    try:
        yield
    finally:
        distributed_c10d._new_process_group_helper = make_group


def forget_placements() -> None:
    """DTensor caches plans by mesh but not by rank, and ranks of an uneven shard differ."""
    forget_decisions(thoroughly=True)
    for name in ("_gen_transform_infos", "get_redistribute_planner"):
        clear = getattr(getattr(_redistribute, name, None), "cache_clear", None)
        if clear is not None:
            clear()
    clear_planners = getattr(_redistribute, "clear_redistribute_planner_cache", None)
    if clear_planners is not None:
        clear_planners()


@contextmanager
def fake_tensors() -> Iterator[fake_tensor.FakeTensorMode]:
    """Give tensors shapes and no data until the context ends; real ones met on the way pass."""
    log = logging.getLogger(FAKE_TENSOR_LOG)
    log.addFilter(_is_news)
    try:
        with _unpinned_fakes(), fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        log.removeFilter(_is_news)


@contextmanager
def _unpinned_fakes() -> Iterator[None]:
    """Let tensors without data be pinned, which torch cannot do: they stay as they are."""
    pin = torch.Tensor.pin_memory
    is_inherited = "pin_memory" not in vars(torch.Tensor)

    @functools.wraps(pin)
    def pin_memory(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if isinstance(tensor, _FakeTensor) else pin(tensor, *args, **kwargs)

    torch.Tensor.pin_memory = pin_memory  # type: ignore[assignment]
    try:
        yield
    finally:
        if is_inherited:
            del torch.Tensor.pin_memory
        else:
            torch.Tensor.pin_memory = pin


_MESH_METHODS = ("__init__", "_flatten", "_unflatten", "from_group", "mesh")


@contextmanager
def meshes_with_data() -> Iterator[None]:
    """Let meshes read their own lists of ranks, tensors too, where other tensors have no data."""
    with ExitStack() as stack:
        for name in _MESH_METHODS:
            if name in vars(DeviceMesh):
                method = vars(DeviceMesh)[name]
                stack.callback(setattr, DeviceMesh, name, method)
                setattr(DeviceMesh, name, _with_data(method))
        yield


def _with_data(function: Any) -> Any:
    if isinstance(function, property):
        return property(_with_data(function.fget))
    if isinstance(function, staticmethod):
        return staticmethod(_with_data(function.__func__))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with without_modes():
            if isinstance(kwargs.get("_rank_map"), _FakeTensor):  # init_device_mesh() made it
                kwargs["_rank_map"] = torch.arange(kwargs["_rank_map"].numel())
            return function(*args, **kwargs)

    return call


@contextmanager
def explained_lack_of_data() -> Iterator[None]:
    """Say more of an exception that tensors without data raise when they are asked for some."""
    try:
        yield
    except NO_DATA[:2] as error:
        error.add_note(
            "In a simulated world, tensors have no data after materialize(), so that nothing can "
            "depend on a value (.item(), .tolist(), if loss > …). Leave that out, or build the "
            "model with real tensors and do not call materialize()."
        )
        raise


def empty_fakes(model: nn.Module, device: str) -> None:
    """Do what `to_empty()` does for tensors that are fake already, which it cannot convert."""
    for module in model.modules():
        holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in holders:
            for name, tensor in held.items():
                if tensor is not None and tensor.is_meta and isinstance(tensor, _FakeTensor):
                    held[name] = _empty_like(tensor, device)


def _empty_like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    empty = torch.empty_like(tensor.data, device=device)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty


def _is_news(record: logging.LogRecord) -> bool:
    """torch logs whatever an op raises, with its traceback; our refusals speak for themselves."""
    return not (record.exc_info and isinstance(record.exc_info[1], ShardscopeError))


def complete_work(tensors: list[torch.Tensor]) -> Any:
    """Finished work whose future holds `tensors`; the fake group's own future holds None."""
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    return _create_work_from_future(future).boxed()


@final
class ReceivedFrom(FakeWork):
    """Finished work of a receive from anyone, who turns out to be `sender`, a rank of the group.

    It must be kept alive: torch's side of it does not know the sender.
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
    """Give the ops that have no kernel for tensors without data an empty one."""
    library = Library("c10d", "IMPL")
    try:
        for name in _UNANSWERED:
            if hasattr(torch.ops.c10d, name) and not _has_kernel(f"c10d::{name}", "Meta"):
                library.impl(name, _answer_nothing(name), "Meta")
        yield
    finally:
        library._destroy()


_COPYING = (
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "alltoall_",
    "alltoall_base_",
    "gather_",
    "gather_into_tensor_",
    "reduce_scatter_",
)


@contextmanager
def uncopied_mismatches() -> Iterator[None]:
    """Let outputs keep what they hold where the fake group cannot copy this rank's inputs there."""
    library = Library("c10d", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is overridden
            for name in _COPYING:
                for key in ("CPU", "CUDA"):
                    if _has_kernel(f"c10d::{name}", key):
                        answer = _copy_if_possible(name, get_kernel(f"c10d::{name}", key))
                        library.impl(name, answer, key, with_keyset=True)
        yield
    finally:
        library._destroy()


def _copy_if_possible(name: str, kernel: Any) -> Callable[..., Any]:
    answer_nothing = _answer_nothing(name)

    def answer(keyset: Any, *args: Any) -> Any:
        try:
            return kernel.call_boxed(keyset, *args)
        except RuntimeError:  # other ranks' pieces, or a whole of another shape: both are allowed
            return answer_nothing(*args)

    return answer


def _answer_nothing(name: str) -> Callable[..., Any]:
    """A kernel that leaves the outputs as they are."""
    has_outputs = len(getattr(torch.ops.c10d, name).default._schema.returns) > 1

    def answer(*args: Any) -> Any:
        work = FakeWork().boxed()
        return (args[0], work) if has_outputs else work

    return answer


def _has_kernel(op: str, key: str) -> bool:
    """Whether torch has the op, which it may not have in every version, and runs it there."""
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op, key))
    except RuntimeError:
        return False
