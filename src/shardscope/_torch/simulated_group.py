"""torch's fake process group, and the process-wide state that a world must put back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch._C._distributed_c10d import _create_work_from_future
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import _random as dtensor_random
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from shardscope._torch.intercept import meta_kernel

__all__ = ["coalesced_ops_on_fake_tensors", "complete_work", "fake_tensors", "simulated_group"]


@contextmanager
def simulated_group(rank: int, size: int) -> Iterator[None]:
    """Make this process `rank` of a fake default group of `size`; leave nothing behind."""
    tracker = dtensor_random._rng_tracker
    _forget_placements()
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
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


def fake_tensors() -> FakeTensorMode:
    """A mode in which tensors have shapes and no data; real ones met on the way are accepted."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def complete_work(tensors: list[torch.Tensor]) -> Any:
    """Finished work whose future holds `tensors`; the fake group's own future holds None."""
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    return _create_work_from_future(future).boxed()


_UNANSWERED = (
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "allreduce_coalesced_",
    "reduce_scatter_tensor_coalesced_",
)


@contextmanager
def coalesced_ops_on_fake_tensors() -> Iterator[None]:
    """Give the coalesced ops, which have no kernel for tensors without data, one that does nothing."""
    library = torch.library.Library("c10d", "IMPL")
    try:
        for name in _UNANSWERED:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "Meta"):
                library.impl(name, meta_kernel(name), "Meta")
        yield
    finally:
        library._destroy()
