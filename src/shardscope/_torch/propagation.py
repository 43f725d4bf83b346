"""What DTensor decides when an op is dispatched: which inputs it moves, where results lie.

It is watched while it decides; its tables are not consulted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _collective_utils
from torch.distributed.tensor import _random as dtensor_random
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import Placement

from shardscope._torch.dispatch import without_modes

__all__ = [
    "Decision",
    "Place",
    "added_handlers",
    "forget_decisions",
    "implicit_replicas",
    "kept_propagator",
    "local_part",
    "op_handlers",
    "quiet_collectives",
    "watch_decisions",
]


def forget_decisions() -> None:
    """Let DTensor decide anew: it would answer for some static arguments as it did for others."""
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


Place = tuple[Placement, ...]


class Decision(NamedTuple):
    """How DTensor will run one op. Arguments are counted as the op's schema counts them.

    `moves` maps an argument, or one tensor of a list in it, to its placements before and after.
    `is_by_parts` says that the op has no rule, and that one was found from the ops it is made of.
    """

    op: Any
    moves: dict[tuple[int, ...], tuple[Place, Place]]
    outputs: list[Place | None]
    is_by_parts: bool


@contextmanager
def watch_decisions(
    note: Callable[[Decision], None], note_failure: Callable[[Any], None]
) -> Iterator[None]:
    """Tell `note` of every op that this thread dispatches on DTensors, once it is decided how.

    Of an op for which nothing could be decided `note_failure` is told.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    depth, deepest, own = 0, 0, get_ident()

    def watched(propagate: Any) -> Any:
        def call(schema: Any) -> Any:
            nonlocal depth, deepest
            if get_ident() != own:
                return propagate(schema)
            depth, deepest = depth + 1, max(deepest, depth + 1)
            try:
                decided = propagate(schema)
            except Exception:
                if depth == 1:
                    note_failure(schema.op)
                raise
            finally:
                depth -= 1
                is_by_parts, deepest = deepest > depth + 1, (deepest if depth else 0)
            if not depth:
                note(_read(schema, decided, is_by_parts))
            return decided

        # DTensor empties the cache through the callable that stands here.
        for name in ("cache_clear", "cache_info"):
            if hasattr(propagate, name):
                setattr(call, name, getattr(propagate, name))
        return call

    names = ("propagate_op_sharding", "propagate_op_sharding_non_cached")
    originals = {name: propagator.__dict__.get(name) for name in names}
    for name in names:
        setattr(propagator, name, watched(getattr(propagator, name)))
    try:
        yield
    finally:
        for name, original in originals.items():
            if original is None:
                delattr(propagator, name)
            else:
                setattr(propagator, name, original)


def _read(schema: Any, decided: Any, is_by_parts: bool) -> Decision:
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
        is_by_parts,
    )


def _specs(
    values: Any, place: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], DTensorSpec]]:
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
    forget_decisions()
    try:
        yield
    finally:
        forget_decisions()
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
    """Keep DTensor from saying on standard error what groups of CPUs cannot do."""
    log = logging.getLogger(_collective_utils.__name__)
    is_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = is_disabled


def local_part(shape: Sequence[int], mesh: DeviceMesh, placements: Place) -> tuple[int, ...]:
    """The shape of this rank's part of a tensor that lies on `mesh` like this."""
    with without_modes():  # it counts with tensors
        part, _ = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    return tuple(part)
