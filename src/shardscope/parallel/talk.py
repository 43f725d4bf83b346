"""What a rank says to others, in order, found without writing its whole program.

Only moves talk, and values that enter computations in pieces. They are written as for the rank's
program, but on tensors without data, by a wire that listens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast, final

import torch
from torch import Tensor, fx

from shardscope.parallel.choices import SYM_SIZE
from shardscope.parallel.costs import Hints, size_hint
from shardscope.parallel.flow import Flow, Move, Step, Value
from shardscope.parallel.gradients import Gradients
from shardscope.parallel.layouts import Seat
from shardscope.parallel.moves import write_move
from shardscope.parallel.placements import Size
from shardscope.parallel.uses import Uses, find_uses
from shardscope.record import CollectiveKind, Phase

__all__ = ["Said", "listen"]


@final
@dataclass(eq=False)
class Said:
    """One collective: what the rank puts in, and for whom.

    Forward, `steps` has the move alone; backward, whose dual it is: the move, or all steps that
    the value enters.
    """

    kind: CollectiveKind
    axis: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    reduction: str
    phase: Phase
    value: Value
    steps: list[Step | Move]
    is_said: bool = True
    has_entered: bool = False  # the value was used in pieces while whole

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def listen(
    flow: Flow, seat: Seat, *, gradients: Gradients | None = None, uses: Uses | None = None
) -> list[Said]:
    """All that the rank which sits there says; with gradients, backward too.

    `uses` are those of the flow, for who listens to several ranks.
    """
    return _Walk(flow, seat, gradients, uses or find_uses(flow)).listen()


@final
class _Walk:
    def __init__(self, flow: Flow, seat: Seat, gradients: Gradients | None, uses: Uses) -> None:
        self._flow = flow
        self._seat = seat
        self._gradients = gradients
        self._uses = uses
        self._pen = _Pen(flow.sizes.hints)
        self._wire = _Listener(seat, self._pen)
        self._entered: dict[tuple[Value, tuple[int, ...]], list[Said]] = {}

    def listen(self) -> list[Said]:
        for step in self._flow.steps:
            if isinstance(step, Move):
                self._enter(step, 0)
                self._write(step)
            elif self._gradients is not None and step.op is not SYM_SIZE:
                for position in range(len(step.inputs)):
                    self._enter(step, position)
        # Autograd goes back in the order in which what it goes back through was made.
        backward = [one for one in reversed(self._wire.backward) if one.is_said]
        return [*self._wire.forward, *(backward if self._gradients else ())]

    def _write(self, move: Move) -> None:
        self._wire.turn_to(move.value, move, is_heard=self._passes(move, 0))
        is_entering = self._uses.only_enters(move.output, move.axis)
        value = cast(fx.Node, self._stand_in(move.value))
        pen, wire = cast(Any, self._pen), cast(Any, self._wire)
        write_move(move, value, seat=self._seat, pen=pen, wire=wire, is_entering=is_entering)

    def _enter(self, step: Step | Move, position: int) -> None:
        value, axes = step.inputs[position], self._uses.axes_entered(step, position)
        if not axes or self._gradients is None:
            return
        is_heard = self._passes(step, position)
        if (value, axes) not in self._entered:
            before = len(self._wire.backward)
            self._wire.turn_to(value, step, is_heard=False)
            for axis in axes:
                self._wire.enter(self._stand_in(value), axis=axis)
            self._entered[value, axes] = self._wire.backward[before:]
        for said in self._entered[value, axes]:
            said.is_said |= is_heard
            said.has_entered = True
            if is_heard:
                said.steps.append(step)

    def _passes(self, step: Step | Move, position: int) -> bool:
        return self._gradients is not None and self._gradients.passes(step, position)

    def _stand_in(self, value: Value) -> Tensor:
        local = [self._pen.size(one) for one in value.layout.local_shape(self._seat)]
        return torch.empty(local, dtype=value.dtype, device="meta")


@final
class _Pen:
    """Does what is written at once, on tensors without data."""

    def __init__(self, hints: Hints) -> None:
        self._hints = hints

    def write(self, op: Any, /, *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    def item(self, value: Any, index: int) -> Any:
        return value[index]

    def size(self, value: Size) -> int:
        return size_hint(value, self._hints)


@final
@dataclass
class _Listener:
    """A wire that notes what goes over it, and what will come back."""

    seat: Seat
    pen: _Pen
    forward: list[Said] = field(default_factory=list)
    backward: list[Said] = field(default_factory=list)  # in the order of the forward pass

    def turn_to(self, value: Value, step: Step | Move, *, is_heard: bool) -> None:
        """What follows is for this value; its gradient is asked for, or not."""
        self._value, self._step, self._is_heard = value, step, is_heard

    def all_reduce(self, value: Tensor, *, axis: int, reduction: str) -> Tensor:
        self._say(CollectiveKind.ALL_REDUCE, value, axis, reduction)
        return value

    def all_gather(self, value: Tensor, *, axis: int, is_entering: bool) -> Tensor:
        self._say(CollectiveKind.ALL_GATHER, value, axis)
        whole = value.new_empty([value.shape[0] * self._num_ranks(axis), *value.shape[1:]])
        if is_entering:
            self._say_back(CollectiveKind.REDUCE_SCATTER, whole, axis, "sum")
        return whole

    def reduce_scatter(self, value: Tensor, *, axis: int) -> Tensor:
        self._say(CollectiveKind.REDUCE_SCATTER, value, axis, "sum")
        piece = value.new_empty([value.shape[0] // self._num_ranks(axis), *value.shape[1:]])
        self._say_back(CollectiveKind.ALL_GATHER, piece, axis)
        return piece

    def all_to_all(self, value: Tensor, *, axis: int, length: Size) -> Tensor:
        self._say(CollectiveKind.ALL_TO_ALL, value, axis)
        self._say_back(CollectiveKind.ALL_TO_ALL, value, axis)
        return value

    def take(
        self, value: Tensor, *, axis: int, dim: int, start: Size, size: Size, is_even: bool
    ) -> Tensor:
        shape = list(value.shape)
        shape[dim] = self.pen.size(size)
        piece = value.new_empty(shape)
        if is_even:
            self._say_back(CollectiveKind.ALL_GATHER, piece.movedim(dim, 0), axis)
        else:
            self.enter(value, axis=axis)
        return piece

    def enter(self, value: Tensor, *, axis: int) -> Tensor:
        self._say_back(CollectiveKind.ALL_REDUCE, value, axis, "sum")
        return value

    def _num_ranks(self, axis: int) -> int:
        return self.seat.sizes[axis]

    def _say(self, kind: CollectiveKind, value: Tensor, axis: int, reduction: str = "") -> None:
        said = self._make(kind, value, axis, reduction, Phase.FORWARD)
        said.steps.append(self._step)
        self.forward.append(said)

    def _say_back(
        self, kind: CollectiveKind, value: Tensor, axis: int, reduction: str = ""
    ) -> None:
        said = self._make(kind, value, axis, reduction, Phase.BACKWARD)
        said.is_said = self._is_heard
        if self._is_heard:
            said.steps.append(self._step)
        self.backward.append(said)

    def _make(
        self, kind: CollectiveKind, value: Tensor, axis: int, reduction: str, phase: Phase
    ) -> Said:
        shape = tuple(value.shape)
        return Said(kind, axis, shape, value.dtype, reduction, phase, self._value, [])
