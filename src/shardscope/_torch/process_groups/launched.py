"""Process groups of a program that was started as one rank of many, without the other ranks.

The program calls `init_process_group` itself, with any backend and address, or torch does so inside
`init_device_mesh`. It joins at once: nothing is sent, and no address is contacted.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.pipelining import schedules as pipeline_schedules

from shardscope._torch.cuda.runtime import replace_attribute, replacement_class
from shardscope._torch.dtensor import dtensor_random
from shardscope._torch.process_groups.simulated import (
    fake_groups_only,
    forget_placements,
    require_fake_groups,
)

OnJoin = Callable[[int, int], None]
"""Called with the rank and world size with which the program joins its default group."""


@contextmanager
def joined_at_once(rank: int, size: int, on_join: OnJoin) -> Iterator[None]:
    """Let `init_process_group` return at once, as `rank` of `size` unless the program names others.

    The default group is destroyed when the context ends, if the program has not done so.
    """
    require_fake_groups()
    tracker, excepthook, level = (
        dtensor_random._rng_tracker, sys.excepthook, dist.get_debug_level(),
    )  # fmt: skip
    forget_placements()

    def rendezvous(url: str, given: int = -1, given_size: int = -1, **_: Any) -> Iterator[Any]:
        variables = os.environ  # the program may have set them itself
        joined = (
            int(variables.get("RANK", rank)) if given < 0 else given,
            int(variables.get("WORLD_SIZE", size)) if given_size < 0 else given_size,
        )
        on_join(*joined)
        yield dist.HashStore(), *joined

    with ExitStack() as stack:
        replace_attribute(stack, distributed_c10d, "rendezvous", rendezvous)
        replace_attribute(stack, distributed_c10d, "_store_based_barrier", _pass_barrier)
        for module in (dist, distributed_c10d):
            for name in ("TCPStore", "FileStore"):
                kind = getattr(dist, name)
                store = replacement_class(kind, lambda *args, **kwargs: dist.HashStore())
                if hasattr(module, name):
                    replace_attribute(stack, module, name, store)
        # Without NCCL, torch warns that it does not know its timeout.
        timeout = distributed_c10d.default_pg_timeout
        replace_attribute(stack, distributed_c10d, "default_pg_nccl_timeout", timeout)
        stack.enter_context(fake_groups_only("nccl"))
        _keep_requested_backends(stack)
        for module in (dist, distributed_c10d, device_mesh):
            replace_attribute(stack, module, "split_group", split_group)
        dist.set_debug_level(min(level, dist.DebugLevel.INFO, key=lambda choice: choice.value))
        try:
            yield
        finally:
            dist.set_debug_level(level)
            if dist.is_initialized():
                dist.destroy_process_group()
            dtensor_random._rng_tracker, sys.excepthook = tracker, excepthook
            forget_placements()


def _keep_requested_backends(stack: ExitStack) -> None:
    """Make `get_backend` return the backend that the program asked for, not "fake"."""
    make_group = distributed_c10d._new_process_group_helper
    signature = inspect.signature(make_group.__wrapped__)

    @functools.wraps(make_group)
    def make(*args: Any, **kwargs: Any) -> Any:
        group, store = make_group(*args, **kwargs)
        backend = signature.bind(*args, **kwargs).arguments["backend"]
        groups = distributed_c10d._world.pg_map
        if group in groups:  # not if this rank is no member
            groups[group] = (distributed_c10d.Backend(backend or "undefined"), groups[group][1])
        return group, store

    replace_attribute(stack, distributed_c10d, "_new_process_group_helper", make)


def split_group(
    parent_pg: Any = None, split_ranks: Any = None, *args: Any, group_desc: Any = None, **_: Any
) -> Any:
    """The group of this rank among those that a group is split into; None if it is in none."""
    ranks = dist.get_process_group_ranks(parent_pg or dist.group.WORLD)
    for positions in split_ranks:
        members = [ranks[position] for position in positions]
        if dist.get_rank() in members:
            return dist.new_group(members, use_local_synchronization=True, group_desc=group_desc)
    return None


def _pass_barrier(*args: Any, **kwargs: Any) -> None:
    """A barrier over the store, which the other ranks would never reach."""


@contextmanager
def watched_schedules(
    begin: Callable[[list[nn.Module]], None], end: Callable[[], None]
) -> Iterator[None]:
    """Call `begin` with the modules of its stages, and `end`, around each step of a pipeline."""
    base = pipeline_schedules._PipelineSchedule
    with ExitStack() as stack:
        for cls in (base, *_subclasses(base)):
            if "step" in vars(cls):
                stack.callback(setattr, cls, "step", vars(cls)["step"])
                cls.step = _watched_step(vars(cls)["step"], begin, end)
        yield


def _subclasses(cls: Any) -> Iterator[Any]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _watched_step(
    step: Callable[..., Any], begin: Callable[[list[nn.Module]], None], end: Callable[[], None]
) -> Callable[..., Any]:
    @functools.wraps(step)
    def watched(schedule: Any, *args: Any, **kwargs: Any) -> Any:
        stages = getattr(schedule, "_stages", None) or [schedule._stage]
        begin([stage.submod for stage in stages])
        try:
            return step(schedule, *args, **kwargs)
        finally:
            end()

    return watched
