"""Why a value moves, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

from shardscope.parallel.flow import Flow, Move, Origin, Role, Step, Value, values_in
from shardscope.parallel.placements import Placement, Replicate, Shard
from shardscope.parallel.rules.call import Strategy

__all__ = ["GradientNames", "shorten_op", "tell_handing", "tell_need"]


def tell_need(step: Step | Move, strategy: Strategy, position: int) -> str:
    """`aten.add needs both whole`, `aten.linear's mm needs its mat2 cut along dim 0`."""
    how = _tell(strategy.inputs[position])
    if isinstance(step, Move):
        return f"a redistribution along another axis needs it {how}"
    op = _name_op(step.origin)
    if len(strategy.inputs) == 1:
        return f"{op} needs it {how}"
    if all(one == strategy.inputs[position] for one in strategy.inputs):
        return f"{op} needs {'both' if len(strategy.inputs) == 2 else 'all'} {how}"
    name = list(_argument_names(step.arguments))[position]
    return f"{op} needs its {'input' if name == 'self' else name} {how}"


def tell_handing(role: Role, placement: Placement) -> str:
    """`the program returns it whole`."""
    how = _tell(placement)
    if role.kind == "output":
        return f"the program returns it {how}"
    if role.kind == "piece":
        return f"what it is a part of has it {how}"
    return f"the new {role.name} is {how}"


def shorten_op(op: str) -> str:
    """`aten.add` of `aten.add.Tensor`: overloads say little to a reader."""
    parts = op.split(".")
    return ".".join(parts[:2]) if len(parts) == 3 else op


def _name_op(origin: Origin) -> str:
    """`aten.add`, or `aten.linear's add` of an op that was taken apart."""
    op = shorten_op(origin.op)
    return f"{shorten_op(origin.part_of)}'s {op.rpartition('.')[2]}" if origin.part_of else op


def _tell(placement: Placement) -> str:
    if isinstance(placement, Replicate):
        return "replicated"
    return (
        f"sharded along dim {placement.dim}"
        if isinstance(placement, Shard)
        else ("as partial sums")
    )


def _argument_names(arguments: dict[str, Any]) -> Iterator[str]:
    """The name of each tensor argument, in order."""
    for name, nest in arguments.items():
        yield from (name for one in values_in(nest) if isinstance(one, Value) and one.is_tensor)


@final
class GradientNames:
    """Why a gradient moves, in the words of the user's program."""

    def __init__(self, flow: Flow) -> None:
        self._roles = dict(flow.inputs)
        self._makers: dict[Value, Origin] = {}
        for step in flow.steps:
            if isinstance(step, Step):  # one that was taken apart stands for the original's values
                made = [*step.outputs, *(one.root for one in step.outputs)]
                self._makers.update(dict.fromkeys(made, step.origin))

    def tell(self, value: Value, steps: Sequence[Step | Move], *, has_entered: bool) -> str:
        """`gradient of norm.weight, which layers.0.norm uses sharded`.

        `steps` are those through which it comes back: the move whose dual it is, or, where the
        value has entered computations in pieces, all of these.
        """
        user = steps[0].origin.module
        if not has_entered:
            cause = steps[0].cause if isinstance(steps[0], Move) else ""
            return f"gradient of {self._name(value.root, None)} (forward: {cause})"
        users = list(dict.fromkeys(one.origin.module for one in steps))
        more = f" and {len(users) - 1} more modules use" if len(users) > 1 else " uses"
        what = self._name(value.root, user)
        return f"gradient of {what}, which {user or 'the program'}{more} sharded"

    def _name(self, value: Value, user: str | None) -> str:
        role, maker = self._roles.get(value), self._makers.get(value)
        if role is not None:
            return f"the input {role.name}" if role.kind == "input" else role.name
        if maker is None:
            return value.name
        if maker.module and maker.module != user:
            return f"the output of {maker.module}"
        return f"{shorten_op(maker.part_of or maker.op)}'s result"
