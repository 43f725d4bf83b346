"""Decides, for one mesh axis, how every value lies and where values move."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch

from shardscope.errors import PlanError
from shardscope.parallel.blame import blamed_on
from shardscope.parallel.causes import tell_handing, tell_need
from shardscope.parallel.choices import Chooser
from shardscope.parallel.costs import START_BYTES, Hints, price, wire_bytes
from shardscope.parallel.flow import Flow, Move, Origin, Role, Step, Value, map_nest, values_in
from shardscope.parallel.layouts import Seat
from shardscope.parallel.placements import Partial, Placement, Replicate, Shard
from shardscope.parallel.rules.call import Strategy
from shardscope.parallel.takeapart import Apart, take_apart

__all__ = ["Fallback", "Wishes", "propagate_axis"]

# Where the data are cut, weights are gathered to meet them; elsewhere they stay as planned.
_FOLLOW_DATA, _KEEP_WEIGHTS = 1e-3, 100.0
_MAX_DEPTH = 3  # of ops taken apart within ops taken apart


@final
@dataclass(frozen=True)
class Wishes:
    """What the plan says of one axis."""

    inputs: dict[Value, Placement]  # how the program's inputs lie; replicated if not here
    entering: dict[tuple[str, Value], Placement]  # by module call and value
    leaving: dict[Value, Placement]
    outputs: Callable[[Role], Placement | None]  # None: as it comes, but whole of addends
    is_data_axis: bool = False  # weights follow the data, not the data the weights
    left: dict[Value, str] = field(default_factory=dict)  # the module that a value leaves


@final
@dataclass(frozen=True)
class Fallback:
    """An op that cannot run on the pieces it is given."""

    axis: int
    kind: str  # "decomposition" or "replicate"
    origin: Origin
    placements: tuple[Placement, ...]  # of its tensor arguments, as they were offered
    size_bytes: int  # moved because of it


def propagate_axis(
    flow: Flow, *, axis: int, seat: Seat, wishes: Wishes, is_training: bool = False
) -> list[Fallback]:
    """Give every value of the flow its placement along the axis, and put in the moves."""
    chooser = Chooser(axis=axis, seat=seat, is_training=is_training)
    return _Pass(flow, axis, seat, wishes, flow.sizes.hints, chooser).run()


class _StuckError(PlanError):
    """A value cannot be had in the placement that is wanted."""


@final
@dataclass(frozen=True)
class _Mark:
    """How far a pass had come."""

    num_steps: int
    moved: set[tuple[Value, Placement]]
    current: dict[Value, Value]
    fallbacks: list[Fallback]
    spent: float


@final
@dataclass
class _Pass:
    flow: Flow
    axis: int
    seat: Seat
    wishes: Wishes
    hints: Hints
    chooser: Chooser
    steps: list[Step | Move] = field(default_factory=list)
    moved: dict[tuple[Value, Placement], Value] = field(default_factory=dict)
    current: dict[Value, Value] = field(default_factory=dict)  # what stands for a value now
    fallbacks: list[Fallback] = field(default_factory=list)
    parameters: set[Value] = field(default_factory=set)
    uses: Counter[Value] = field(default_factory=Counter)
    makers: dict[Value, Step | Move] = field(default_factory=dict)
    state: dict[Value, Placement] = field(default_factory=dict)  # new buffers, as they are to lie
    spent: float = 0.0

    def run(self) -> list[Fallback]:
        for value, role in self.flow.inputs:
            value.placements.append(self.wishes.inputs.get(value, Replicate()))
            value.has_gradient = value.is_tensor and value.example.requires_grad
            if role.kind == "parameter":
                self.parameters.add(value)
        for step in self.flow.steps:
            self.uses.update(set(values_in(_arguments(step))))
        self.state = {one: wished for one, wished in self._new_state() if wished is not None}
        for step in self.flow.steps:
            with blamed_on(step.origin, "cut"):
                self.advance(step)
        self.flow.outputs = [self._hand_out(one, role) for one, role in self.flow.outputs]
        self.flow.steps = self.steps
        return self.fallbacks

    def _new_state(self) -> Iterator[tuple[Value, Placement | None]]:
        for item, role in self.flow.outputs:
            if role.kind == "mutation" and isinstance(item, Value):
                yield item, self.wishes.outputs(role)

    def advance(self, step: Step | Move, depth: int = 0) -> None:
        """Choose how the step runs, move its arguments there, and note how its results lie."""
        self._enter(step)
        strategy, cost = self._choose(step)
        gathered = self._gathers(step, strategy)
        if gathered and depth < _MAX_DEPTH and self._advance_apart(step, cost, depth):
            return
        if gathered and not self._follows_data(step, strategy) and not self._could_stay(step):
            self._note("replicate", step, cost)
        self._apply(step, strategy)

    def _enter(self, step: Step | Move) -> None:
        """Take what stands for each argument, and move what the plan wants moved on entering."""

        def find(item: Any) -> Any:
            if not isinstance(item, Value):
                return item
            value = self.current.get(item, item)
            if not value.is_tensor or isinstance(step, Move):
                return value
            for call, module in step.origin.calls:
                wanted = self.wishes.entering.get((call, value.root))
                if wanted is not None and not _is_pinned(value, wanted):
                    cause = f"the plan's input of {module or 'the program'}"
                    value = self._move(value, wanted, step.origin, cause)
            return value

        _set_arguments(step, map_nest(_arguments(step), find))

    def _choose(self, step: Step | Move) -> tuple[Strategy, float]:
        offered = [self._placement(one) for one in step.inputs]
        listed = self.chooser.list_strategies(step, offered)
        priced = [
            (self._price(step, one), -_num_kept(one, offered), i) for i, one in enumerate(listed)
        ]
        cost, _, index = min(priced)
        return listed[index], cost

    def _price(self, step: Step | Move, strategy: Strategy) -> float:
        """Bytes on the wire for its arguments, and for what the plan wants of its results."""
        wished = self._wished(step)
        total = 0.0
        for value, target in {(v, p) for v, p in zip(step.inputs, strategy.inputs, strict=True)}:
            is_wished = target == wished or wished in strategy.outputs
            total += self._price_of_moving(value, target, is_wished=is_wished)
            total += self._price_of_waiting(step, value, target)
        results = [one for one in step.outputs if one.is_tensor]
        for value, placement in zip(results, strategy.outputs, strict=True):
            target = self.wishes.leaving.get(value.root, placement)
            if target != placement:
                total += _times(price(placement, target, is_wished=True), self._bytes(value))
            total += self._price_of_keeping(value, placement)
        return total + self._price_of_sharding(results, strategy)

    def _price_of_sharding(self, results: Sequence[Value], strategy: Strategy) -> float:
        """What it costs to shard a result of which no input is sharded: as much as slicing it.

        So a value that is computed from replicated values only stays replicated, unless the plan
        wants it sharded or a later op has a sharded argument to combine it with.
        """
        if any(not isinstance(one, Replicate) for one in strategy.inputs):
            return 0.0
        return sum(
            price(Replicate(), placement) * self._bytes(value)
            for value, placement in zip(results, strategy.outputs, strict=True)
            if isinstance(placement, Shard)
        )

    def _price_of_keeping(self, value: Value, placement: Placement) -> float:
        """What it takes to have a buffer's new value as the buffer lies: a collective of its own.

        Such values are small, and it is their number that costs.
        """
        wanted = self.state.get(value, placement)
        if price(placement, wanted) < 1:
            return 0.0
        return START_BYTES + price(placement, wanted) * self._bytes(value)

    def _price_of_moving(self, value: Value, target: Placement, *, is_wished: bool) -> float:
        if (value, target) in self.moved:
            return 0.0
        sources = [self._placement(value)]
        if (value, Replicate()) in self.moved:
            sources.append(Replicate())
        each = min(price(one, target, is_wished=is_wished) for one in sources)
        is_collective = each > price(Replicate(), Shard(0))
        if is_collective and value.root in self.parameters:
            each *= _FOLLOW_DATA if self.wishes.is_data_axis else _KEEP_WEIGHTS
        return _times(each, self._bytes(value)) if each else 0.0

    def _price_of_waiting(self, step: Step | Move, value: Value, target: Placement) -> float:
        """Addends may wait to be summed, unless that is to be done several times, or on more."""
        if not isinstance(target, Partial) or isinstance(step, Move):
            return 0.0
        if self.uses[value] > 1:
            return 2.5 * self._bytes(value)
        grown = sum(self._bytes(one) for one in step.outputs if one.is_tensor) - self._bytes(value)
        return 2.0 * max(0, grown)

    def _wished(self, step: Step | Move) -> Placement | None:
        wished = [self.wishes.leaving.get(one.root) for one in step.outputs]
        return next((one for one in wished if one is not None), None)

    def _apply(self, step: Step | Move, strategy: Strategy) -> None:
        targets = iter(enumerate(strategy.inputs))

        def place(item: Any) -> Any:
            if not isinstance(item, Value) or not item.is_tensor:
                return item
            position, target = next(targets)
            if self._placement(item) == target:
                return item
            cause = self._tell_cause(step, strategy, position)
            return self._move(item, target, step.origin, cause)

        _set_arguments(step, map_nest(_arguments(step), place))
        placements = iter(strategy.outputs)
        for value in step.outputs:
            value.placements.append(next(placements) if value.is_tensor else Replicate())
            value.has_gradient = _passes_gradient(step, value)
        step.strategies.append(strategy)
        self.steps.append(step)
        self.makers.update(dict.fromkeys(step.outputs, step))
        for value in step.outputs:
            wanted = self.wishes.leaving.get(value.root)
            if wanted is not None and not isinstance(step, Move):
                cause = self._tell_leaving(step, value)
                self.current[value] = self._move(value, wanted, step.origin, cause)

    def _tell_cause(self, step: Step | Move, strategy: Strategy, position: int) -> str:
        wished = self._wished(step)
        is_part = isinstance(step, Step) and step.is_rewritten
        if is_part and wished is not None and strategy.inputs[position] == wished:
            return self._tell_leaving(step, step.outputs[0])
        return tell_need(step, strategy, position)

    def _tell_leaving(self, step: Step | Move, value: Value) -> str:
        module = self.wishes.left.get(value.root, step.origin.module)
        return f"the plan's output of {module or 'the program'}"

    def _move(self, value: Value, target: Placement, origin: Origin, cause: str) -> Value:
        if self._placement(value) == target:
            return value
        if (value, target) not in self.moved:
            self.moved[value, target] = self._write_move(value, target, origin, cause)
        return self.moved[value, target]

    def _write_move(self, value: Value, target: Placement, origin: Origin, cause: str) -> Value:
        whole = self.moved.get((value, Replicate()))
        start = whole if whole is not None and isinstance(target, Shard) else value
        source = self._placement(start)
        each = price(source, target, is_wished=True)
        if each == math.inf:
            raise _StuckError(
                f"the plan wants {value.name} to be {target} along axis {self.axis} of the mesh, "
                f"but it is {source}, which cannot be turned into partial sums. Leave that "
                "placement out of the plan."
            )
        self.spent += each * self._bytes(value)
        output = Value(
            f"{value.name}_{len(self.moved)}",
            shape=value.shape,
            dtype=value.dtype,
            placements=[*start.placements[: self.axis], target],
            example=value.example,
            has_gradient=value.has_gradient,
            origin=value.root,
        )
        sharded = self._make_shard(start, output)
        if sharded is not None:
            self.steps.append(sharded)
            return output
        self.steps.append(
            Move(
                axis=self.axis,
                value=start,
                output=output,
                source=source,
                target=target,
                origin=origin,
                cause=cause,
                strategies=[None] * (self.axis + 1),
            )
        )
        return output

    def _make_shard(self, value: Value, output: Value) -> Step | None:
        """The step that made a replicated value, making only the shard `output` of it.

        Only an op such as expand can do so from replicated inputs. The gradient of its input is
        then reduced, which is smaller than the value whose gradient would have to be gathered.
        """
        step, target = self.makers.get(value), output.placements[self.axis]
        if not isinstance(step, Step) or not isinstance(target, Shard) or len(step.outputs) > 1:
            return None
        replicated = (Replicate(),) * len(step.inputs)
        if self._placement(value) != Replicate() or step.strategies[self.axis].inputs != replicated:
            return None
        for strategy in self.chooser.list_strategies(step, replicated):
            if strategy.inputs == replicated and strategy.outputs == (target,):
                made = [*step.strategies[: self.axis], strategy]
                return replace(step, outputs=[output], result=output, strategies=made)
        return None

    def _hand_out(self, item: Any, role: Role) -> tuple[Any, Role]:
        if not isinstance(item, Value) or not item.is_tensor:
            return item, role
        value = self.current.get(item, item)
        wanted = self.wishes.outputs(role)
        if wanted is None and isinstance(self._placement(value), Partial):
            wanted = Replicate()
        if wanted is None:
            return value, role
        return self._move(value, wanted, Origin(), tell_handing(role, wanted)), role

    def _advance_apart(self, step: Step | Move, cost: float, depth: int) -> bool:
        """Try the step in pieces; keep them if less is moved."""
        apart = take_apart(step, self.flow.sizes) if isinstance(step, Step) else None
        if apart is None:
            return False
        mark = self._mark()
        try:
            self._advance_pieces(step, apart, depth)
        except _StuckError:
            self._take_back(mark)
            return False
        moved = self.spent - mark.spent + self._price_of_keeping_all(apart)
        if moved >= cost:
            self._take_back(mark)
            return False
        if not apart.is_ours:
            self._note("decomposition", step, moved)
        return True

    def _price_of_keeping_all(self, apart: Apart) -> float:
        results = ((old, self._placement(self.current[old])) for old in apart.results)
        return sum(self._price_of_keeping(old, lies) for old, lies in results if old.is_tensor)

    def _advance_pieces(self, step: Step | Move, apart: Apart, depth: int) -> None:
        pieces, results = self._bring_up(apart)
        for piece in pieces:
            self.uses.update(set(values_in(_arguments(piece))))
            self.advance(piece, depth + 1)
        for old, new in zip(apart.results, results, strict=True):
            self.current[old] = self.current.get(new, new)

    def _bring_up(self, apart: Apart) -> tuple[list[Step | Move], list[Value]]:
        """Place the pieces along the axes before this one, as the step was placed there."""
        results = [(new, Role("piece", str(i))) for i, new in enumerate(apart.results.values())]
        flow = Flow(inputs=[], steps=list(apart.steps), outputs=results, sizes=self.flow.sizes)
        olds = list(apart.results)
        for axis in range(self.axis):
            wanted = [old.placements[axis] for old in olds]
            wishes = Wishes({}, {}, {}, outputs=lambda role, w=wanted: w[int(role.name)])  # type: ignore[misc]
            chooser = Chooser(axis=axis, seat=self.seat, is_training=self.chooser.is_training)
            inner = _Pass(flow, axis, self.seat, wishes, self.hints, chooser)
            self.fallbacks += inner.run()
            self.spent += inner.spent
        return flow.steps, [one for one, _ in flow.outputs]

    def _mark(self) -> _Mark:
        return _Mark(
            len(self.steps),
            set(self.moved),
            dict(self.current),
            list(self.fallbacks),
            self.spent,
        )

    def _take_back(self, mark: _Mark) -> None:
        del self.steps[mark.num_steps :]
        self.moved = {key: one for key, one in self.moved.items() if key in mark.moved}
        self.current, self.fallbacks, self.spent = mark.current, mark.fallbacks, mark.spent

    def _gathers(self, step: Step | Move, strategy: Strategy) -> bool:
        """Whether pieces must be put together for want of a way to run on them."""
        wanted = zip(step.inputs, strategy.inputs, strict=True)
        return any(
            isinstance(self._placement(value), Shard) and self._placement(value) != target
            for value, target in wanted
        )

    def _could_stay(self, step: Step | Move) -> bool:
        """Whether pieces were put together by choice: it could have run on them as they lie."""
        listed = self.chooser.list_strategies(step, [self._placement(one) for one in step.inputs])
        return any(
            not self._gathers(step, one) and self._price(step, one) < math.inf for one in listed
        )

    def _follows_data(self, step: Step | Move, strategy: Strategy) -> bool:
        """Whether all that is gathered are weights, for the sake of data in pieces."""
        wanted = zip(step.inputs, strategy.inputs, strict=True)
        gathered = [v for v, target in wanted if self._placement(v) not in (target, Replicate())]
        return self.wishes.is_data_axis and all(one.root in self.parameters for one in gathered)

    def _note(self, kind: str, step: Step | Move, cost: float) -> None:
        offered = tuple(self._placement(one) for one in step.inputs)
        self.fallbacks.append(Fallback(self.axis, kind, step.origin, offered, int(cost)))

    def _placement(self, value: Value) -> Placement:
        return value.placements[self.axis]

    def _bytes(self, value: Value) -> int:
        return wire_bytes(value, self.axis, self.seat, self.hints)


def _times(each: float, num_bytes: int) -> float:
    """A price per byte for so many; what cannot be done stays so for an empty tensor."""
    return each if each == math.inf else each * num_bytes


def _num_kept(strategy: Strategy, offered: Sequence[Placement]) -> int:
    return sum(one == other for one, other in zip(strategy.inputs, offered, strict=True))


def _passes_gradient(step: Step | Move, output: Value) -> bool:
    if isinstance(step, Step) and step.op is torch.ops.aten.detach.default:
        return False
    is_number = output.dtype is not None and (
        output.dtype.is_floating_point or output.dtype.is_complex
    )
    return is_number and any(one.has_gradient for one in step.inputs)


def _is_pinned(value: Value, wanted: Placement) -> bool:
    return value.placements[-1] == wanted


def _arguments(step: Step | Move) -> Any:
    return step.arguments if isinstance(step, Step) else step.value


def _set_arguments(step: Step | Move, arguments: Any) -> None:
    if isinstance(step, Step):
        step.arguments = arguments
    else:
        step.value = arguments
