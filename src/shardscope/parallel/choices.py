"""The strategies that a step may choose from along one axis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, final

import sympy
import torch

from shardscope._torch.dispatch import is_overload
from shardscope.parallel.flow import Move, Step, Value, map_nest
from shardscope.parallel.layouts import Layout, Seat
from shardscope.parallel.placements import Partial, Placement, Replicate, Shard, Size, divides
from shardscope.parallel.rules.call import Call, Strategy, TensorSpec
from shardscope.parallel.rules.lookup import find_rule
from shardscope.parallel.rules.memory import memory_order
from shardscope.parallel.rules.randomness import is_random
from shardscope.parallel.rules.terms import leaves_some

SYM_SIZE = torch.ops.aten.sym_size.int

__all__ = ["SYM_SIZE", "Chooser", "describe_call", "replicate_all"]


def replicate_all(step: Step | Move) -> Strategy:
    """Every rank does the whole step."""
    num_outputs = sum(one.is_tensor for one in step.outputs)
    whole = Replicate()
    return Strategy((whole,) * len(step.inputs), (whole,) * num_outputs)


@final
class Chooser:
    """Lists strategies, once for all steps that are alike."""

    def __init__(self, *, axis: int, seat: Seat, is_training: bool) -> None:
        self._axis = axis
        self._seat = seat
        self.is_training = is_training
        self._known: dict[Any, list[Strategy]] = {}

    @property
    def num_ranks(self) -> int:
        return self._seat.sizes[self._axis]

    def list_strategies(self, step: Step | Move, offered: Sequence[Placement]) -> list[Strategy]:
        """The ways to run the step without communication, "all replicated" last."""
        if isinstance(step, Move):
            return [*_pass_a_move(step, offered[0]), replicate_all(step)]
        if step.op is SYM_SIZE:  # known of any piece
            return [Strategy(tuple(offered), ())]
        call = self.describe(step, offered)
        key = (step.op, _freeze(call.arguments), call.outputs, call.offered, call.is_training)
        if key not in self._known:
            self._known[key] = list(self._find(call))
        return [*self._known[key], replicate_all(step)]

    def describe(self, step: Step, offered: Sequence[Placement]) -> Call:
        """The call as rules see it: cut along the axes before this one."""
        return describe_call(
            step,
            num_axes=self._axis,
            seat=self._seat,
            num_ranks=self.num_ranks,
            offered=tuple(offered),
            is_training=self.is_training and any(one.has_gradient for one in step.inputs),
        )

    def _find(self, call: Call) -> Iterator[Strategy]:
        rule = find_rule(call.op) if is_overload(call.op) else None
        if rule is None:
            return
        listed = list(rule(call))
        for strategy in (*listed, *_lift(listed, call)):
            if _is_sound(strategy, call):
                yield strategy


def describe_call(
    step: Step,
    *,
    num_axes: int,
    seat: Seat,
    num_ranks: int,
    offered: tuple[Placement, ...],
    is_training: bool,
) -> Call:
    """A step as a call, its tensors cut along the first axes."""

    def spec_of(value: Any) -> Any:
        if not isinstance(value, Value):
            return value
        if not value.is_tensor:
            return value.scalar
        spec = _spec(value, num_axes, seat)
        return replace(spec, memory_order=memory_order(value.example)) if draws else spec

    draws = is_overload(step.op) and is_random(step.op)

    return Call(
        op=step.op,
        arguments=map_nest(step.arguments, spec_of),
        outputs=tuple(_spec(one, num_axes, seat) for one in step.outputs if one.is_tensor),
        num_ranks=num_ranks,
        offered=offered,
        is_training=is_training,
    )


def _spec(value: Value, num_axes: int, seat: Seat) -> TensorSpec:
    assert value.dtype is not None
    if not num_axes:
        return TensorSpec(value.shape, value.dtype)
    cut = Layout(value.shape, tuple(value.placements[:num_axes]))
    first = Seat(seat.sizes[:num_axes], (0,) * num_axes)
    return TensorSpec(cut.local_shape(first), value.dtype)


def _lift(strategies: Iterable[Strategy], call: Call) -> Iterator[Strategy]:
    """Strategies that do not care which indices a rank holds, for cuts in blocks."""
    blocks = {one for one in call.offered if isinstance(one, Shard) and not one.is_plain}
    for strategy in strategies:
        if not strategy.is_order_blind or len(_cut_sizes(strategy, call)) != 1:
            continue
        for block in blocks:
            wanted = zip(strategy.inputs, call.offered, strict=True)
            if any(one == Shard(block.dim) and offer == block for one, offer in wanted):
                yield Strategy(
                    tuple(_in_blocks(one, block) for one in strategy.inputs),
                    tuple(_in_blocks(one, block) for one in strategy.outputs),
                )


def _in_blocks(placement: Placement, block: Shard) -> Placement:
    return block.at(placement.dim) if isinstance(placement, Shard) else placement


def _cut_sizes(strategy: Strategy, call: Call) -> set[Size]:
    placed = (*zip(strategy.inputs, call.inputs, strict=True),)
    placed += (*zip(strategy.outputs, call.outputs, strict=True),)
    return {spec.shape[one.dim] for one, spec in placed if isinstance(one, Shard)}


def _is_sound(strategy: Strategy, call: Call) -> bool:
    """Pieces of one dim may be uneven; of dims of several sizes they would not match."""
    sizes = _cut_sizes(strategy, call)
    if any(isinstance(size, sympy.Expr) and not divides(call.num_ranks, size) for size in sizes):
        return False
    if len(sizes) > 1 and not all(divides(call.num_ranks, size) for size in sizes):
        return False
    reductions = {one.reduction for one in strategy.outputs if isinstance(one, Partial)}
    # Of nothing there is no maximum. A vocabulary that does not divide leaves something to all.
    is_empty_somewhere = not all(leaves_some(call, size) for size in sizes)
    return not (is_empty_somewhere and reductions - {"sum"})


def _pass_a_move(move: Move, offered: Placement) -> Iterator[Strategy]:
    """A move along another axis: cuts of dims that it does not touch pass, and sums' addends."""
    touched = {one.dim for one in (move.source, move.target) if isinstance(one, Shard)}
    reductions = {one.reduction for one in (move.source, move.target) if isinstance(one, Partial)}
    if isinstance(offered, Shard) and offered.dim not in touched:
        yield Strategy((offered,), (offered,))
    if offered == Partial() and not reductions - {"sum"}:
        yield Strategy((offered,), (offered,))


def _freeze(nest: Any) -> Any:
    if isinstance(nest, (list, tuple)):
        return tuple(_freeze(one) for one in nest)
    if isinstance(nest, dict):
        return tuple((key, _freeze(one)) for key, one in nest.items())
    if isinstance(nest, slice):
        return ("slice", _freeze((nest.start, nest.stop, nest.step)))
    # 1, 1.0 and True are equal, but not the same argument.
    return (type(nest), nest) if isinstance(nest, (int, float, bool)) else nest
