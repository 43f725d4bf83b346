"""What a speller works with: one rank's arguments, its layouts, and a pen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, final

from torch import fx

from shardscope.parallel.layouts import Layout, Seat
from shardscope.parallel.rules.call import Call

__all__ = ["Local", "LocalSize", "Pen"]

LocalSize = int | fx.Node
"""A size in one rank's program: a number, or the node that computes it."""


class Pen(Protocol):
    """Writes nodes into one rank's program."""

    def write(self, op: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
        """Call `op` in the program; the node's value is what it returns."""

    def item(self, value: fx.Node, index: int) -> fx.Node:
        """One of the several values that a node returns."""

    def size(self, value: Any) -> LocalSize:
        """A size (number or sympy expression) as the program can use it."""


@final
@dataclass(frozen=True, eq=False)
class Local:
    """One call on one rank. `arguments` are by the schema's names, tensors are local nodes."""

    call: Call  # the call on the whole tensors
    arguments: Mapping[str, Any]
    inputs: tuple[Layout, ...]  # of its tensor arguments, in `call.inputs`' order
    outputs: tuple[Layout, ...]
    seat: Seat
    pen: Pen

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def output_shape(self, index: int = 0) -> list[LocalSize]:
        """The local shape of one output."""
        return [self.pen.size(one) for one in self.outputs[index].local_shape(self.seat)]

    def input_layout(self, name: str) -> Layout:
        """The layout of the tensor argument of that name (not of one in a list)."""
        spec = self.call[name]
        position = next(i for i, one in enumerate(self.call.inputs) if one is spec)
        return self.inputs[position]

    def repeat(self, /, **changes: Any) -> fx.Node:
        """The same op on the local arguments, with some changed."""
        return self.pen.write(self.call.op, **{**self.arguments, **changes})
