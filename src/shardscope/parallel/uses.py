"""Which values enter computations in pieces while they are whole."""

from __future__ import annotations

from collections import defaultdict
from typing import final

from shardscope.parallel.flow import Flow, Move, Step, Value, values_in
from shardscope.parallel.placements import Replicate, Shard
from shardscope.parallel.rules.call import Strategy

__all__ = ["Uses", "find_uses"]


@final
class Uses:
    """How the steps of a flow use values that are whole along an axis.

    A step in which all is whole passes whole gradients back. One that works in pieces passes
    addends back, which must be summed before they meet those of other uses.
    """

    def __init__(self, flow: Flow) -> None:
        self._kinds: dict[tuple[Value, int], set[bool]] = defaultdict(set)
        self._gathered = {
            (step.output, step.axis)
            for step in flow.steps
            if isinstance(step, Move) and isinstance(step.source, Shard)
        }
        for step in flow.steps:
            for value in step.inputs:
                for axis, placement in enumerate(value.placements):
                    if placement == Replicate():
                        self._kinds[value, axis].add(_is_split(step, axis))
        for item, _ in flow.outputs:
            for value in values_in(item):
                for axis in range(len(value.placements)):
                    self._kinds[value, axis].add(False)

    def only_enters(self, value: Value, axis: int) -> bool:
        """Whether every use of a value that was put together is in pieces."""
        return (value, axis) in self._gathered and self._kinds[value, axis] == {True}

    def axes_entered(self, step: Step | Move, position: int) -> tuple[int, ...]:
        """The axes along which an argument is whole and the step works in pieces.

        Not those for which the move that put it together takes care of the gradients.
        """
        value = step.inputs[position]
        if not value.has_gradient:
            return ()
        return tuple(
            axis
            for axis, placement in enumerate(value.placements)
            if placement == Replicate()
            and _is_split(step, axis)
            and not self.only_enters(value, axis)
        )


def find_uses(flow: Flow) -> Uses:
    """The uses of all values of a flow that is placed along all axes."""
    return Uses(flow)


def _is_split(step: Step | Move, axis: int) -> bool:
    strategy: Strategy | None = step.strategies[axis]
    if strategy is None:  # a move: its own axis is the wire's affair, others it does not touch
        return False
    return any(not isinstance(one, Replicate) for one in (*strategy.inputs, *strategy.outputs))
