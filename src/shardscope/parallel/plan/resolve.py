"""A plan checked against a program and a mesh, and made definite: before anything is traced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from shardscope.errors import PlanError
from shardscope.parallel.placements import Placement, Replicate, Shard
from shardscope.parallel.plan.axes import Axes
from shardscope.parallel.plan.book import Book, Rule
from shardscope.parallel.plan.near import suggest_name
from shardscope.parallel.plan.outline import Outline
from shardscope.parallel.plan.pins import Pins, pin_modules
from shardscope.parallel.plan.plan import Plan
from shardscope.parallel.plan.resolved import Resolved
from shardscope.parallel.plan.values import resolve_wishes
from shardscope.parallel.plan.weights import Weights, say_no_module

__all__ = ["resolve"]


def resolve(plan: Any, outline: Outline, axes: Mapping[str, int]) -> Resolved:
    """What `plan` (whatever `Plan.of` takes) comes to for the program along the mesh's axes."""
    plan, mesh = Plan.of(plan), Axes(axes)
    book = Book(plan.entries, mesh)
    _check_matched(book, outline)
    weights = Weights(book, outline, mesh)
    pins = pin_modules(book, outline, weights, len(axes))
    _check_effects(book, outline, weights, pins)
    inputs = resolve_wishes(plan.inputs, outline.inputs, mesh)
    outputs = resolve_wishes(plan.outputs, outline.outputs, mesh)
    resolved = Resolved(
        axes=dict(axes),
        tensors=weights.placements,
        module_inputs=pins.inputs,
        module_outputs=pins.outputs,
        inputs={path: _whole_unless_said(pin) for path, pin in inputs.items()},
        outputs=outputs,
        rules=_rules(weights, pins),
    )
    _check_not_idle(resolved)
    return resolved


def _whole_unless_said(pin: tuple[Placement | None, ...]) -> tuple[Placement, ...]:
    return tuple(Replicate() if one is None else one for one in pin)


def _rules(weights: Weights, pins: Pins) -> dict[str, tuple[str, ...]]:
    patterns: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for decision in weights.decisions:
        patterns[decision.name][decision.rule.pattern] = None
    for name, rules in pins.rules.items():
        patterns[name].update(dict.fromkeys(rule.pattern for rule in rules))
    return {name: tuple(found) for name, found in patterns.items()}


def _check_matched(book: Book, outline: Outline) -> None:
    """Every entry is for something that the program has."""
    names = [*outline.modules, *outline.homes]
    matched = {rule.position for name in names for rule in book.find(name)}
    for rule in book.rules:
        if rule.position not in matched:
            kind = "module or tensor" if rule.entry.is_pattern else "such module or tensor"
            verb = "that it matches" if rule.entry.is_pattern else ""
            raise PlanError(
                f"The plan names {rule.pattern!r}, but the program has no {kind}"
                f"{' ' if verb else ''}{verb}{suggest_name(rule.pattern, names)}"
            )


def _check_effects(book: Book, outline: Outline, weights: Weights, pins: Pins) -> None:
    """Every entry changes something: it cuts, it pins, or it makes an exception to another."""
    telling = {rule.position for rules in pins.rules.values() for rule in rules}
    heard = set(telling)
    for decision in weights.decisions:
        heard.add(decision.rule.position)
        if decision.dim is not None or decision.is_exception:
            telling.add(decision.rule.position)
    for rule in book.rules:
        if rule.position not in telling:
            raise PlanError(_say_idle(rule, book, outline, is_heard=rule.position in heard))


def _say_idle(rule: Rule, book: Book, outline: Outline, *, is_heard: bool) -> str:
    if is_heard:
        return (
            f"{rule.place} has no effect: what it names stays replicated anyway. Remove it, or "
            "give it a sharded placement."
        )
    names = [name for name in (*outline.modules, *outline.homes) if rule in book.find(name)]
    others = [one for name in names for one in book.find(name) if one is not rule]
    ahead = list(dict.fromkeys(repr(one.pattern) for one in others))
    if not any(name in outline.modules for name in names):
        return say_no_module(rule, names[0])
    if not ahead:
        return (
            f"{rule.place} has no effect: {names[0]!r} has no parameters or buffers itself. "
            "Name the layers in it, or remove the entry."
        )
    return (
        f"{rule.place} is never used: all that it names is decided by {_list(ahead)}. Remove it, "
        "or put it first; an exact name wins over any pattern."
    )


def _list(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")


def _check_not_idle(resolved: Resolved) -> None:
    """The plan does something: cut tensors, pins, or inputs that come in pieces."""
    is_cut = any(isinstance(one, Shard) for row in resolved.inputs.values() for one in row)
    if not (resolved.tensors or resolved.module_inputs or resolved.module_outputs or is_cut):
        raise PlanError(
            "The plan does nothing: it shards no tensor and no input, so every rank would "
            "compute everything. Name what to shard, such as {'layers.*.wq': Colwise()}, or "
            "give the placements of inputs, such as inputs={'tokens': {'dp': Shard(0)}}."
        )
