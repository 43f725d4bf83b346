"""How modules want their inputs and outputs, by the rules of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from shardscope.errors import PlanError
from shardscope.parallel.placements import Placement, Shard
from shardscope.parallel.plan.book import Book, Rule, weight_style
from shardscope.parallel.plan.entries import Styles
from shardscope.parallel.plan.outline import Outline
from shardscope.parallel.plan.resolved import InputPins, Pin
from shardscope.parallel.plan.styles import (
    Colwise,
    CutStyle,
    ModuleInput,
    ModuleOutput,
    Rowwise,
    Sequence,
)
from shardscope.parallel.plan.weights import Weights, is_passed_over, module_cut

__all__ = ["Pins", "pin_modules"]

_Positions = tuple[Placement | None, ...]


@final
@dataclass
class _Wishes:
    """What the rules say of one module's values along one axis; None: not spoken of yet."""

    positional: _Positions | None = None
    keyword: Mapping[str, Placement] = field(default_factory=dict)
    outputs: _Positions | None = None
    rules: list[Rule] = field(default_factory=list)


@final
@dataclass(frozen=True)
class Pins:
    """By module, how its values shall lie; and the rules that say so."""

    inputs: dict[str, InputPins]
    outputs: dict[str, tuple[Pin | None, ...]]
    rules: dict[str, list[Rule]]


def pin_modules(book: Book, outline: Outline, weights: Weights, num_axes: int) -> Pins:
    """The pins of every module that the plan speaks of."""
    pins = Pins({}, {}, {})
    for name in outline.modules:
        if not book.find(name):
            continue
        wishes = [_wishes_for(name, axis, book, outline, weights) for axis in range(num_axes)]
        _enter(pins, name, wishes)
    return pins


def _enter(pins: Pins, name: str, wishes: list[_Wishes]) -> None:
    positional = _transpose([one.positional or () for one in wishes])
    keywords = {key for one in wishes for key in one.keyword}
    keyword = {key: tuple(one.keyword.get(key) for one in wishes) for key in sorted(keywords)}
    if positional or keyword:
        pins.inputs[name] = InputPins(positional, keyword)
    if outputs := _transpose([one.outputs or () for one in wishes]):
        pins.outputs[name] = outputs
    if rules := list(dict.fromkeys(rule for one in wishes for rule in one.rules)):
        pins.rules[name] = rules


def _transpose(by_axis: list[_Positions]) -> tuple[Pin | None, ...]:
    """By position and then axis; a position that nothing is said of is None."""
    length = max(map(len, by_axis))
    rows = [tuple(one[at] if at < len(one) else None for one in by_axis) for at in range(length)]
    pins = [None if all(one is None for one in row) else row for row in rows]
    return tuple(pins) if any(pins) else ()


def _wishes_for(name: str, axis: int, book: Book, outline: Outline, weights: Weights) -> _Wishes:
    """Rules that only pin let others speak of the rest; one that lays out parameters ends it."""
    wishes = _Wishes()
    for rule in book.find(name):
        styles = rule.said.get(axis)
        if styles is None:
            continue
        _hear_pins(wishes, rule, styles)
        style = weight_style(styles)
        if isinstance(style, (Colwise, Rowwise)):
            if is_passed_over(rule, name, outline):
                continue
            _check_has_tensors(name, rule, outline)
            _hear(wishes, rule, *_cut_pins(name, axis, rule, style, outline, weights))
        elif isinstance(style, Sequence):
            _hear(wishes, rule, Shard(style.dim), Shard(style.dim))
        if style is not None:
            break
    return wishes


def _hear_pins(wishes: _Wishes, rule: Rule, styles: Styles) -> None:
    for style in styles:
        if isinstance(style, ModuleInput) and wishes.positional is None:
            wishes.positional, wishes.keyword = style.positional, dict(style.keyword)
            wishes.rules.append(rule)
        elif isinstance(style, ModuleOutput) and wishes.outputs is None:
            wishes.outputs = style.outputs
            wishes.rules.append(rule)


def _hear(wishes: _Wishes, rule: Rule, first: Placement | None, output: Placement | None) -> None:
    if wishes.positional is None and first is not None:
        wishes.positional = (first,)
        wishes.rules.append(rule)
    if wishes.outputs is None and output is not None:
        wishes.outputs = (output,)
        wishes.rules.append(rule)


def _check_has_tensors(name: str, rule: Rule, outline: Outline) -> None:
    module = outline.modules[name]
    if module.parameters or module.buffers:
        return
    below = [one for one in outline.tensors if one.startswith(f"{name}." if name else "")]
    layers = list(dict.fromkeys(one.rpartition(".")[0] for one in below))
    remedy = f"Name the layers in it, such as {layers[0]!r}." if layers else "Remove the entry."
    raise PlanError(
        f"{rule.place} has no effect: {name!r} has no parameters or buffers itself. {remedy}"
    )


def _cut_pins(
    name: str, axis: int, rule: Rule, style: CutStyle, outline: Outline, weights: Weights
) -> tuple[Placement | None, Placement | None]:
    """The first input's and the output's, cut in the same parts as the weight."""
    cut = module_cut(rule, name, style, outline)
    lies = weights.placements.get(f"{name}.weight".lstrip("."))
    weight = None if lies is None else lies[axis]

    def in_parts(pin: Placement | None) -> Placement | None:
        is_cut = isinstance(pin, Shard) and isinstance(weight, Shard)
        return weight.at(pin.dim) if is_cut else pin  # type: ignore[union-attr]

    return style.input or in_parts(cut.input), style.output or in_parts(cut.output)
