"""What DTensor decides when an op is dispatched: which inputs it moves, where results lie.

It is watched while it decides; its tables are not consulted.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from shardscope._torch.dispatch import without_modes
from shardscope._torch.private import find_name

__all__ = [
    "Decision",
    "DecisionWatcher",
    "Place",
    "added_handlers",
    "dtensor_random",
    "forget_decisions",
    "implicit_replicas",
    "kept_propagator",
    "local_part",
    "op_handlers",
    "quiet_collectives",
    "watch_decisions",
]


_TENSOR = "torch.distributed.tensor"

dtensor_random = find_name(f"{_TENSOR}._random", "restore DTensor's random state after a world")
OpDispatcher = find_name(
    f"{_TENSOR}._dispatch.OpDispatcher", "observe which inputs DTensor redistributes"
)
DTensorSpec = find_name(
    f"{_TENSOR}._dtensor_spec.DTensorSpec", "observe which inputs DTensor redistributes"
)
compute_local_shape_and_global_offset = find_name(
    f"{_TENSOR}._utils.compute_local_shape_and_global_offset",
    "compute each rank's shard of a tensor",
)
_clear_fast_path_sharding_prop_cache = find_name(
    f"{_TENSOR}.debug._clear_fast_path_sharding_prop_cache",
    "clear DTensor's cache of sharding decisions",
)
_clear_sharding_prop_cache = find_name(
    f"{_TENSOR}.debug._clear_sharding_prop_cache", "clear DTensor's cache of sharding decisions"
)
_LOGS = (f"{_TENSOR}._collective_utils", f"{_TENSOR}._redistribute")


def forget_decisions(*, thoroughly: bool = False) -> None:
    """Let DTensor decide anew: it would answer for some static arguments as it did for others.

    What it found of the parts of ops it may keep, unless it is to forget thoroughly.
    """
    (_clear_sharding_prop_cache if thoroughly else _clear_fast_path_sharding_prop_cache)()


Place = tuple[Placement, ...]


@dataclass
class Decision:
    """How DTensor will run one op. Arguments are counted as the op's schema counts them.

    `moves` maps an argument, or one tensor of a list in it, to its placements before and after;
    `is_moved` says that they were made, for some ops are run by code that does not listen.
    `num_tried` is how often a part of it had to be decided: more than none if the op has no rule,
    and one was found from the ops it is made of.
    """

    op: Any
    moves: dict[tuple[int, ...], tuple[Place, Place]]
    outputs: list[Place | None]
    num_tried: int
    is_moved: bool = False


class DecisionWatcher(Protocol):
    """Someone who wants to know what DTensor decides."""

    def decided(self, decision: Decision) -> None:
        """An op is about to be run, in this way."""

    def tried(self, num_tried: int) -> None:
        """A layout of a part of an op is about to be tried; what is raised here ends it."""

    def failed(self, op: Any, num_tried: int) -> None:
        """For an op nothing could be decided."""

    def moved(self) -> None:
        """The inputs of the op that was decided last are moved."""


@contextmanager
def watch_decisions(watcher: DecisionWatcher) -> Iterator[None]:
    """Tell `watcher` of every op that this thread dispatches on DTensors."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    depth, num_tried, own = 0, 0, get_ident()

    def watched(propagate: Any) -> Any:
        def call(schema: Any) -> Any:
            nonlocal depth, num_tried
            if get_ident() != own:
                return propagate(schema)
            num_tried = num_tried + 1 if depth else 0
            depth += 1
            try:
                if depth > 1:
                    watcher.tried(num_tried)
                # A mode for tensors without data would keep it from remembering the parts of an
                # op, of which some try thousands of layouts.
                with without_modes() if depth == 1 else nullcontext():
                    decided = propagate(schema)
            except Exception:
                if depth == 1:
                    watcher.failed(schema.op, num_tried)
                raise
            finally:
                depth -= 1
            if not depth:
                watcher.decided(_read(schema, decided, num_tried))
            return decided

        # DTensor empties the cache through the callable that stands here.
        for name in ("cache_clear", "cache_info"):
            if hasattr(propagate, name):
                setattr(call, name, getattr(propagate, name))
        return call

    move = OpDispatcher.redistribute_local_args

    @functools.wraps(move)  # its code is looked for on stacks
    def watched_move(*args: Any, **kwargs: Any) -> Any:
        if get_ident() == own:
            watcher.moved()
        return move(*args, **kwargs)

    names = ("propagate_op_sharding", "propagate_op_sharding_non_cached")
    originals = {name: propagator.__dict__.get(name) for name in names}
    for name in names:
        setattr(propagator, name, watched(getattr(propagator, name)))
    OpDispatcher.redistribute_local_args = staticmethod(watched_move)
    try:
        yield
    finally:
        OpDispatcher.redistribute_local_args = staticmethod(move)
        for name, original in originals.items():
            if original is None:
                delattr(propagator, name)
            else:
                setattr(propagator, name, original)


def _read(schema: Any, decided: Any, num_tried: int) -> Decision:
    before = dict(_specs(schema.args_schema))
    target = decided.redistribute_schema if decided.needs_redistribute else None
    after = before if target is None else dict(_specs(target.args_schema))
    moves = {
        place: (spec.placements, after[place].placements)
        for place, spec in before.items()
        if place in after and spec.placements != after[place].placements
    }
    outputs = decided.output_spec
    several = outputs if isinstance(outputs, Sequence) else [outputs]
    return Decision(
        schema.op,
        moves,
        [one.placements if isinstance(one, DTensorSpec) else None for one in several],
        num_tried,
    )


def _specs(values: Any, place: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Any]]:
    for index, value in enumerate(values):
        if isinstance(value, DTensorSpec):
            yield (*place, index), value
        elif isinstance(value, list | tuple):
            yield from _specs(value, (*place, index))


@contextmanager
def kept_propagator() -> Iterator[None]:
    """Let DTensor forget, on leaving, what it learnt of ops without a rule and of random ones.

    Also who handles an op in its place: `loss_parallel()` that an exception ends leaves its own.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    known, tracker = dict(propagator.op_to_schema_info), dtensor_random._rng_tracker
    handlers = dict(op_handlers())
    forget_decisions(thoroughly=True)
    try:
        yield
    finally:
        forget_decisions(thoroughly=True)
        propagator.op_to_schema_info.clear()
        propagator.op_to_schema_info.update(known)
        dtensor_random._rng_tracker = tracker
        _set_handlers(handlers)


def op_handlers() -> dict[Any, Any]:
    """What runs ops in DTensor's place, as it is now."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    return handlers


def _set_handlers(handlers: Mapping[Any, Any]) -> None:
    op_handlers().clear()
    op_handlers().update(handlers)


@contextmanager
def added_handlers(handlers: Mapping[Any, Any], note: Callable[[], None]) -> Iterator[None]:
    """Let these run ops too, and tell `note` of it, until the context ends."""

    def noted(handler: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            note()
            return handler(*args, **kwargs)

        return call

    before = dict(op_handlers())
    op_handlers().update({op: noted(handler) for op, handler in handlers.items()})
    try:
        yield
    finally:
        _set_handlers(before)


@contextmanager
def implicit_replicas() -> Iterator[None]:
    """Let plain tensors that meet DTensors count as whole on every rank.

    torch's own context for it leaves the switch off, also where it was on before.
    """
    dispatcher = DTensor._op_dispatcher
    before = dispatcher._allow_implicit_replication
    dispatcher._allow_implicit_replication = True
    try:
        yield
    finally:
        dispatcher._allow_implicit_replication = before


@contextmanager
def quiet_collectives() -> Iterator[None]:
    """Keep DTensor from saying on standard error what groups of CPUs cannot do, or do slowly."""
    logs = [logging.getLogger(name) for name in _LOGS]
    before = [log.disabled for log in logs]
    for log in logs:
        log.disabled = True
    try:
        yield
    finally:
        for log, is_disabled in zip(logs, before, strict=True):
            log.disabled = is_disabled


def local_part(shape: Sequence[int], mesh: DeviceMesh, placements: Place) -> tuple[int, ...]:
    """The shape of this rank's part of a tensor that lies on `mesh` like this."""
    with without_modes():  # it counts with tensors
        part, _ = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    return tuple(part)
