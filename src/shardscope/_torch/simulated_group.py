"""torch's fake process group, and the process-wide state that a world must put back as it was."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch._C._distributed_c10d import FakeWork, _create_work_from_future
from torch._subclasses import fake_tensor
from torch.distributed.tensor import _random as dtensor_random
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.library import Library, get_kernel

from shardscope.errors import ShardscopeError

__all__ = [
    "ReceivedFrom",
    "coalesced_ops_on_fake_tensors",
    "complete_work",
    "fake_tensors",
    "simulated_group",
    "uncopied_mismatches",
]


@contextmanager
def simulated_group(rank: int, size: int) -> Iterator[None]:
    """Make this process `rank` of a fake default group of `size`; leave nothing behind."""
    tracker = dtensor_random._rng_tracker
    _forget_placements()
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        if dist.is_initialized():  # many programs close it themselves
            dist.destroy_process_group()
        dtensor_random._rng_tracker = tracker
        _forget_placements()


def _forget_placements() -> None:
    """DTensor caches plans by mesh but not by rank, and ranks of an uneven shard differ."""
    _clear_sharding_prop_cache()
    for name in ("_gen_transform_infos", "get_redistribute_planner"):
        clear = getattr(getattr(_redistribute, name, None), "cache_clear", None)
        if clear is not None:
            clear()
    clear_planners = getattr(_redistribute, "clear_redistribute_planner_cache", None)
    if clear_planners is not None:
        clear_planners()


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Give tensors shapes and no data until the context ends; real ones met on the way pass."""
    log = logging.getLogger(fake_tensor.__name__)
    log.addFilter(_is_news)
    try:
        with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """torch logs whatever an op raises, with its traceback; our refusals speak for themselves."""
    return not (record.exc_info and isinstance(record.exc_info[1], ShardscopeError))


def complete_work(tensors: list[torch.Tensor]) -> Any:
    """Finished work whose future holds `tensors`; the fake group's own future holds None."""
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    return _create_work_from_future(future).boxed()


class ReceivedFrom(FakeWork):
    """Finished work of a receive from anyone, who turns out to be `sender`, a rank of the group.

    It must be kept alive: torch's side of it does not know the sender.
    """

    def __init__(self, sender: int) -> None:
        super().__init__()
        self._sender = sender

    def _source_rank(self) -> int:
        return self._sender


_UNANSWERED = (
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "allreduce_coalesced_",
    "reduce_scatter_tensor_coalesced_",
)


@contextmanager
def coalesced_ops_on_fake_tensors() -> Iterator[None]:
    """Give the coalesced ops, which have no kernel for tensors without data, an empty one."""
    library = Library("c10d", "IMPL")
    try:
        for name in _UNANSWERED:
            if not _has_kernel(f"c10d::{name}", "Meta"):
                library.impl(name, lambda *_: FakeWork().boxed(), "Meta")
        yield
    finally:
        library._destroy()


_COPYING = ("_allgather_base_", "allgather_", "alltoall_")


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
                        answer = _copy_if_possible(get_kernel(f"c10d::{name}", key))
                        library.impl(name, answer, key, with_keyset=True)
        yield
    finally:
        library._destroy()


def _copy_if_possible(kernel: Any) -> Callable[..., Any]:
    def answer(keyset: Any, *args: Any) -> Any:
        try:
            return kernel.call_boxed(keyset, *args)
        except RuntimeError:  # other ranks' pieces, or a whole of another shape: both are allowed
            return args[0], FakeWork().boxed()

    return answer


def _has_kernel(op: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op, key))
