"""Where values enter and leave the modules that a plan names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from shardscope.errors import PlanError
from shardscope.parallel.flow import Flow, Origin, Step, Value, values_in
from shardscope.parallel.placements import Placement, Shard
from shardscope.parallel.plan.resolved import InputPins, Pin, Resolved

__all__ = ["Borders", "find_borders"]


@final
@dataclass(frozen=True)
class Borders:
    """The plan's wishes for values, over all axes; None leaves a value as it comes."""

    entering: dict[tuple[str, Value], Pin] = field(default_factory=dict)  # by module call
    leaving: dict[Value, Pin] = field(default_factory=dict)
    left: dict[Value, str] = field(default_factory=dict)  # by what leaves it, the module


@final
@dataclass
class _Call:
    """One call of a module: what it takes from outside and what others take from it."""

    module: str
    entering: dict[Value, None] = field(default_factory=dict)
    leaving: dict[Value, None] = field(default_factory=dict)


def find_borders(
    flow: Flow, resolved: Resolved, aliases: Mapping[str, Sequence[str]] | None = None
) -> Borders:
    """The values to which the plan's wishes for modules apply.

    `aliases` are the other names of tensors: a module's own do not enter it, by whatever name.
    """
    wanted = {*resolved.module_inputs, *resolved.module_outputs}
    borders = Borders()
    for key, call in _find_calls(flow, wanted, aliases or {}).items():
        pins = resolved.module_inputs.get(call.module)
        if pins is not None:
            for value, pin in _match_inputs(call, pins):
                borders.entering[key, value] = _from_front(pin, value)
        _match_outputs(call, resolved.module_outputs.get(call.module, ()), borders)
    return borders


def _find_calls(
    flow: Flow, modules: set[str], aliases: Mapping[str, Sequence[str]]
) -> dict[str, _Call]:
    state = {
        value: (role.name, *aliases.get(role.name, ()))
        for value, role in flow.inputs
        if role.kind != "input"
    }
    made_in: dict[Value, Origin] = {}
    calls: dict[str, _Call] = {}
    for step in flow.steps:
        assert isinstance(step, Step)
        for value in values_in(step.arguments):
            _note_use(value, step.origin, made_in, calls, modules, state)
        made_in.update(dict.fromkeys(step.outputs, step.origin))
    for item, _ in flow.outputs:
        for value in values_in(item):
            _note_use(value, Origin(), made_in, calls, modules, state)
    return calls


def _note_use(
    value: Value,
    user: Origin,
    made_in: Mapping[Value, Origin],
    calls: dict[str, _Call],
    modules: set[str],
    state: Mapping[Value, Sequence[str]],
) -> None:
    if not value.is_tensor:
        return
    maker = made_in.get(value, Origin())
    for key, module in _only_in(user, maker, modules):
        if any(name.startswith(f"{module}.") or not module for name in state.get(value, ())):
            continue
        calls.setdefault(key, _Call(module)).entering[value] = None
    for key, module in _only_in(maker, user, modules):
        calls.setdefault(key, _Call(module)).leaving[value] = None


def _only_in(one: Origin, other: Origin, modules: set[str]) -> Iterable[tuple[str, str]]:
    return [call for call in one.calls if call[1] in modules and call not in other.calls]


def _match_inputs(call: _Call, pins: InputPins) -> Iterable[tuple[Value, Pin]]:
    """Positional inputs in the order in which the module first uses them."""
    values = list(call.entering)
    if pins.keyword:
        raise PlanError(
            f"the plan places the keyword argument {next(iter(pins.keyword))!r} of {call.module}, "
            "but an exported program does not keep the names of its modules' arguments. Give the "
            "placements by position."
        )
    num_wanted = max((i + 1 for i, pin in enumerate(pins.positional) if pin), default=0)
    if num_wanted > len(values):
        raise PlanError(
            f"the plan places input {num_wanted - 1} of {call.module}, but only {len(values)} "
            "tensors enter it in this program. Leave out the placements of the others."
        )
    return [(v, pin) for v, pin in zip(values, pins.positional, strict=False) if pin]


def _match_outputs(call: _Call, pins: tuple[Pin | None, ...], borders: Borders) -> None:
    values = list(call.leaving)
    if not values:
        return  # nobody uses what it computes
    if len(pins) > len(values) and any(pins[len(values) :]):
        raise PlanError(
            f"the plan places output {len(pins) - 1} of {call.module}, but only {len(values)} "
            "tensors leave it in this program. Leave out the placements of the others."
        )
    for value, pin in zip(values, pins, strict=False):
        if pin:
            borders.leaving[value] = _from_front(pin, value)
            borders.left[value] = call.module


def _from_front(pin: Pin, value: Value) -> Pin:
    return tuple(_count_from_front(one, value) for one in pin)


def _count_from_front(placement: Placement | None, value: Value) -> Placement | None:
    if not isinstance(placement, Shard):
        return placement
    num_dims = len(value.shape)
    if not -num_dims <= placement.dim < num_dims:
        raise PlanError(
            f"the plan shards dim {placement.dim} of {value.name}, which has {num_dims} dims. "
            "Name a dim that it has."
        )
    return placement.at(placement.dim % num_dims)
