"""A plan checked against a program and a mesh, and resolved to placements, before anything is
traced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

from shardscope.errors import PlanError
from shardscope.parallel.plan.io_constraints import resolve_io_constraints
from shardscope.parallel.plan.match import Axes, PlanMatcher, Rule, suggest_name, weight_style
from shardscope.parallel.plan.parse import Styles
from shardscope.parallel.plan.plan import Plan
from shardscope.parallel.plan.program_index import ProgramIndex
from shardscope.parallel.plan.styles import (
    Colwise,
    ModuleInput,
    ModuleOutput,
    Rowwise,
    Sequence,
    ShardingStyle,
)
from shardscope.parallel.plan.weights import (
    Weights,
    describe_not_a_module,
    is_incidental_match,
    module_sharding,
)
from shardscope.plan.placements import Placement, Replicate, Shard

PlacementConstraint: TypeAlias = tuple[Placement | None, ...]
"""How a value shall lie along each mesh axis, in the mesh's order; None leaves it as it comes.

Dims may be negative, counted from the back: a plan does not know how many a value has.
"""


@final
@dataclass(frozen=True)
class InputConstraints:
    """Constraints on a module's inputs: by position, and by the names of keyword arguments."""

    positional: tuple[
        PlacementConstraint | None, ...
    ] = ()  # None, or beyond the end: no constraint
    keyword: Mapping[str, PlacementConstraint] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class ResolvedPlan:
    """The placements that a plan comes to, checked against the program and the mesh.

    Tensors that are replicated along every axis are left out; a tensor with several names is
    there under each of them. Dims of tensors are counted from the front, those of constraints may
    be negative.
    """

    axes: Mapping[str, int]
    tensors: Mapping[str, tuple[Placement, ...]] = field(default_factory=dict)
    module_inputs: Mapping[str, InputConstraints] = field(default_factory=dict)
    module_outputs: Mapping[str, tuple[PlacementConstraint | None, ...]] = field(
        default_factory=dict
    )
    inputs: Mapping[str, tuple[Placement, ...]] = field(default_factory=dict)  # by path
    outputs: Mapping[str, PlacementConstraint] = field(default_factory=dict)  # by path
    rules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By the name of a tensor or module, the patterns of the entries that decided."""


_Positions = tuple[Placement | None, ...]


@final
@dataclass
class _AxisModuleConstraints:
    """The constraints on a module's inputs and outputs along one axis; None: no rule so far."""

    positional: _Positions | None = None
    keyword: Mapping[str, Placement] = field(default_factory=dict)
    outputs: _Positions | None = None
    rules: list[Rule] = field(default_factory=list)


@final
@dataclass(frozen=True)
class ModuleConstraints:
    """By module, the constraints on its inputs and outputs, and the rules that they come from."""

    inputs: dict[str, InputConstraints]
    outputs: dict[str, tuple[PlacementConstraint | None, ...]]
    rules: dict[str, list[Rule]]


def constrain_modules(
    matcher: PlanMatcher, index: ProgramIndex, weights: Weights, num_axes: int
) -> ModuleConstraints:
    """The constraints of every module that a rule of the plan matches."""
    module_constraints = ModuleConstraints({}, {}, {})
    for name in index.modules:
        if not matcher.find(name):
            continue
        constraints = [
            _axis_constraints(name, axis, matcher, index, weights) for axis in range(num_axes)
        ]
        _add_module(module_constraints, name, constraints)
    return module_constraints


def _add_module(
    module_constraints: ModuleConstraints, name: str, constraints: list[_AxisModuleConstraints]
) -> None:
    positional = _transpose([along_axis.positional or () for along_axis in constraints])
    keywords = {key for along_axis in constraints for key in along_axis.keyword}
    keyword = {
        key: tuple(along_axis.keyword.get(key) for along_axis in constraints)
        for key in sorted(keywords)
    }
    if positional or keyword:
        module_constraints.inputs[name] = InputConstraints(positional, keyword)
    if outputs := _transpose([along_axis.outputs or () for along_axis in constraints]):
        module_constraints.outputs[name] = outputs
    if rules := list(
        dict.fromkeys(rule for along_axis in constraints for rule in along_axis.rules)
    ):
        module_constraints.rules[name] = rules


def _transpose(by_axis: list[_Positions]) -> tuple[PlacementConstraint | None, ...]:
    """By position and then axis; None for a position without a constraint along any axis."""
    length = max(map(len, by_axis))
    rows = [
        tuple(row[position] if position < len(row) else None for row in by_axis)
        for position in range(length)
    ]
    module_constraints = [
        None if all(placement is None for placement in row) else row for row in rows
    ]
    return tuple(module_constraints) if any(module_constraints) else ()


def _axis_constraints(
    name: str, axis: int, matcher: PlanMatcher, index: ProgramIndex, weights: Weights
) -> _AxisModuleConstraints:
    """Collect the constraints of the rules in order, up to the first that places parameters."""
    constraints = _AxisModuleConstraints()
    for rule in matcher.find(name):
        styles = rule.styles_by_axis.get(axis)
        if styles is None:
            continue
        _read_constraints(constraints, rule, styles)
        style = weight_style(styles)
        if isinstance(style, (Colwise, Rowwise)):
            if is_incidental_match(rule, name, index):
                continue
            _check_has_tensors(name, rule, index)
            _add_constraints(
                constraints, rule, *_shard_constraints(name, axis, rule, style, index, weights)
            )
        elif isinstance(style, Sequence):
            _add_constraints(constraints, rule, Shard(style.dim), Shard(style.dim))
        if style is not None:
            break
    return constraints


def _read_constraints(constraints: _AxisModuleConstraints, rule: Rule, styles: Styles) -> None:
    for style in styles:
        if isinstance(style, ModuleInput) and constraints.positional is None:
            constraints.positional, constraints.keyword = style.positional, dict(style.keyword)
            constraints.rules.append(rule)
        elif isinstance(style, ModuleOutput) and constraints.outputs is None:
            constraints.outputs = style.outputs
            constraints.rules.append(rule)


def _add_constraints(
    constraints: _AxisModuleConstraints,
    rule: Rule,
    first: Placement | None,
    output: Placement | None,
) -> None:
    if constraints.positional is None and first is not None:
        constraints.positional = (first,)
        constraints.rules.append(rule)
    if constraints.outputs is None and output is not None:
        constraints.outputs = (output,)
        constraints.rules.append(rule)


def _check_has_tensors(name: str, rule: Rule, index: ProgramIndex) -> None:
    module = index.modules[name]
    if module.parameters or module.buffers:
        return
    below = [tensor for tensor in index.tensors if tensor.startswith(f"{name}." if name else "")]
    layers = list(dict.fromkeys(tensor.rpartition(".")[0] for tensor in below))
    remedy = f"Name the layers in it, such as {layers[0]!r}." if layers else "Remove the entry."
    raise PlanError(
        f"{rule.location} has no effect: {name!r} has no parameters or buffers itself. {remedy}"
    )


def _shard_constraints(
    name: str, axis: int, rule: Rule, style: ShardingStyle, index: ProgramIndex, weights: Weights
) -> tuple[Placement | None, Placement | None]:
    """The placements of the first input and the output, sharded in the same parts as the weight."""
    sharding = module_sharding(rule, name, style, index)
    placements = weights.placements.get(f"{name}.weight".lstrip("."))
    weight = None if placements is None else placements[axis]

    def in_parts(placement: Placement | None) -> Placement | None:
        is_sharded = isinstance(placement, Shard) and isinstance(weight, Shard)
        return weight.at(placement.dim) if is_sharded else placement  # type: ignore[union-attr]

    return style.input or in_parts(sharding.input), style.output or in_parts(sharding.output)


def resolve(plan: Any, index: ProgramIndex, axes: Mapping[str, int]) -> ResolvedPlan:
    """Check `plan` (anything that `Plan.of` takes) against a program and a mesh, and resolve it."""
    plan, mesh = Plan.of(plan), Axes(axes)
    matcher = PlanMatcher(plan.entries, mesh)
    _check_matched(matcher, index)
    weights = Weights(matcher, index, mesh)
    module_constraints = constrain_modules(matcher, index, weights, len(axes))
    _check_effects(matcher, index, weights, module_constraints)
    inputs = resolve_io_constraints(plan.inputs, index.inputs, mesh)
    outputs = resolve_io_constraints(plan.outputs, index.outputs, mesh)
    resolved = ResolvedPlan(
        axes=dict(axes),
        tensors=weights.placements,
        module_inputs=module_constraints.inputs,
        module_outputs=module_constraints.outputs,
        inputs={path: _replicated_by_default(constraint) for path, constraint in inputs.items()},
        outputs=outputs,
        rules=_rules(weights, module_constraints),
    )
    _check_has_effect(resolved)
    return resolved


def _replicated_by_default(constraint: tuple[Placement | None, ...]) -> tuple[Placement, ...]:
    return tuple(Replicate() if placement is None else placement for placement in constraint)


def _rules(weights: Weights, module_constraints: ModuleConstraints) -> dict[str, tuple[str, ...]]:
    patterns: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for decision in weights.decisions:
        patterns[decision.name][decision.rule.pattern] = None
    for name, rules in module_constraints.rules.items():
        patterns[name].update(dict.fromkeys(rule.pattern for rule in rules))
    return {name: tuple(matched) for name, matched in patterns.items()}


def _check_matched(matcher: PlanMatcher, index: ProgramIndex) -> None:
    """Raise PlanError if an entry matches no module or tensor of the program."""
    names = [*index.modules, *index.primary_names]
    matched = {rule.position for name in names for rule in matcher.find(name)}
    for rule in matcher.rules:
        if rule.position not in matched:
            kind = "module or tensor" if rule.entry.is_pattern else "such module or tensor"
            verb = "that it matches" if rule.entry.is_pattern else ""
            raise PlanError(
                f"The plan names {rule.pattern!r}, but the program has no {kind}"
                f"{' ' if verb else ''}{verb}{suggest_name(rule.pattern, names)}"
            )


def _check_effects(
    matcher: PlanMatcher,
    index: ProgramIndex,
    weights: Weights,
    module_constraints: ModuleConstraints,
) -> None:
    """Raise PlanError if an entry has no effect: no sharding, no constraint, no exception."""
    effective = {rule.position for rules in module_constraints.rules.values() for rule in rules}
    used = set(effective)
    for decision in weights.decisions:
        used.add(decision.rule.position)
        if decision.dim is not None or decision.is_exception:
            effective.add(decision.rule.position)
    for rule in matcher.rules:
        if rule.position not in effective:
            raise PlanError(_describe_unused(rule, matcher, index, is_used=rule.position in used))


def _describe_unused(
    rule: Rule, matcher: PlanMatcher, index: ProgramIndex, *, is_used: bool
) -> str:
    if is_used:
        return (
            f"{rule.location} has no effect: what it names stays replicated anyway. Remove it, or "
            "give it a sharded placement."
        )
    names = [name for name in (*index.modules, *index.primary_names) if rule in matcher.find(name)]
    other_rules = [
        other_rule for name in names for other_rule in matcher.find(name) if other_rule is not rule
    ]
    earlier = list(dict.fromkeys(repr(other_rule.pattern) for other_rule in other_rules))
    if not any(name in index.modules for name in names):
        return describe_not_a_module(rule, names[0])
    if not earlier:
        return (
            f"{rule.location} has no effect: {names[0]!r} has no parameters or buffers itself. "
            "Name the layers in it, or remove the entry."
        )
    return (
        f"{rule.location} is never used: all that it names is decided by {_join_names(earlier)}. "
        "Remove it, "
        "or put it first; an exact name wins over any pattern."
    )


def _join_names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")


def _check_has_effect(resolved: ResolvedPlan) -> None:
    """Raise PlanError if the plan shards no tensor and no input and constrains no module."""
    is_sharded = any(
        isinstance(placement, Shard) for row in resolved.inputs.values() for placement in row
    )
    if not (resolved.tensors or resolved.module_inputs or resolved.module_outputs or is_sharded):
        raise PlanError(
            "The plan does nothing: it shards no tensor and no input, so every rank would "
            "compute everything. Name what to shard, such as {'layers.*.wq': Colwise()}, or "
            "give the placements of inputs, such as inputs={'tokens': {'dp': Shard(0)}}."
        )
