"""Resolves a plan to placements by name, and checks it against a program and a mesh.

All mistakes in a plan are reported here, before the program is partitioned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TypeAlias, final

from shardscope.errors import PlanError
from shardscope.parallel.plan.mesh_entries import Axes, MeshEntry, place_on_mesh
from shardscope.parallel.plan.program_index import ProgramIndex, ValueInfo
from shardscope.parallel.plan.weights import (
    Weights,
    describe_not_a_module,
    is_incidental_match,
    module_sharding,
)
from shardscope.plan import Plan, PlanMatcher
from shardscope.plan.match import suggest_name
from shardscope.plan.placements import Placement, Replicate, Shard, describe_placement
from shardscope.plan.plan import IOConstraint
from shardscope.plan.styles import (
    Colwise,
    ModuleInput,
    ModuleOutput,
    Rowwise,
    Sequence,
    ShardingStyle,
    Styles,
    weight_style,
)
from shardscope.record.patterns import is_pattern, matches_name

PlacementConstraint: TypeAlias = tuple[Placement | None, ...]
"""The placement that the plan demands of a value along each mesh axis; None: no constraint.

Dims may be negative, counted from the back: a plan does not know how many dims a value has.
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
    """A plan as placements of tensors and values by name, checked against a program and a mesh.

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
    patterns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By the name of a tensor or module, the patterns of the entries that decided."""


_Positions = tuple[Placement | None, ...]


@final
@dataclass
class _AxisModuleConstraints:
    """The constraints on a module's inputs and outputs along one axis; None: no entry so far."""

    positional: _Positions | None = None
    keyword: Mapping[str, Placement] = field(default_factory=dict)
    outputs: _Positions | None = None
    entries: list[MeshEntry] = field(default_factory=list)


@final
@dataclass(frozen=True)
class ModuleConstraints:
    """By module, the constraints on its inputs and outputs, and the entries that they come from."""

    inputs: dict[str, InputConstraints]
    outputs: dict[str, tuple[PlacementConstraint | None, ...]]
    entries: dict[str, list[MeshEntry]]


def constrain_modules(
    matcher: PlanMatcher[MeshEntry], index: ProgramIndex, weights: Weights, num_axes: int
) -> ModuleConstraints:
    """The constraints of every module that an entry of the plan matches."""
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
    if entries := list(
        dict.fromkeys(entry for along_axis in constraints for entry in along_axis.entries)
    ):
        module_constraints.entries[name] = entries


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
    name: str, axis: int, matcher: PlanMatcher[MeshEntry], index: ProgramIndex, weights: Weights
) -> _AxisModuleConstraints:
    """Collect the constraints of the entries in order, up to the first that places parameters."""
    constraints = _AxisModuleConstraints()
    for entry in matcher.find(name):
        styles = entry.styles_by_axis.get(axis)
        if styles is None:
            continue
        _read_constraints(constraints, entry, styles)
        style = weight_style(styles)
        if isinstance(style, (Colwise, Rowwise)):
            if is_incidental_match(entry, name, index):
                continue
            _check_has_tensors(name, entry, index)
            _add_constraints(
                constraints, entry, *_shard_constraints(name, axis, entry, style, index, weights)
            )
        elif isinstance(style, Sequence):
            _add_constraints(constraints, entry, Shard(style.dim), Shard(style.dim))
        if style is not None:
            break
    return constraints


def _read_constraints(
    constraints: _AxisModuleConstraints, entry: MeshEntry, styles: Styles
) -> None:
    for style in styles:
        if isinstance(style, ModuleInput) and constraints.positional is None:
            constraints.positional, constraints.keyword = style.positional, dict(style.keyword)
            constraints.entries.append(entry)
        elif isinstance(style, ModuleOutput) and constraints.outputs is None:
            constraints.outputs = style.outputs
            constraints.entries.append(entry)


def _add_constraints(
    constraints: _AxisModuleConstraints,
    entry: MeshEntry,
    first: Placement | None,
    output: Placement | None,
) -> None:
    if constraints.positional is None and first is not None:
        constraints.positional = (first,)
        constraints.entries.append(entry)
    if constraints.outputs is None and output is not None:
        constraints.outputs = (output,)
        constraints.entries.append(entry)


def _check_has_tensors(name: str, entry: MeshEntry, index: ProgramIndex) -> None:
    module = index.modules[name]
    if module.parameters or module.buffers:
        return
    below = [tensor for tensor in index.tensors if tensor.startswith(f"{name}." if name else "")]
    layers = list(dict.fromkeys(tensor.rpartition(".")[0] for tensor in below))
    remedy = f"Name the layers in it, such as {layers[0]!r}." if layers else "Remove the entry."
    raise PlanError(
        f"{entry.location} has no effect: {name!r} has no parameters or buffers itself. {remedy}"
    )


def _shard_constraints(
    name: str,
    axis: int,
    entry: MeshEntry,
    style: ShardingStyle,
    index: ProgramIndex,
    weights: Weights,
) -> tuple[Placement | None, Placement | None]:
    """The placements of the first input and the output, sharded in the same parts as the weight."""
    sharding = module_sharding(entry, name, style, index)
    placements = weights.placements.get(f"{name}.weight".lstrip("."))
    weight = None if placements is None else placements[axis]

    def in_parts(placement: Placement | None) -> Placement | None:
        is_sharded = isinstance(placement, Shard) and isinstance(weight, Shard)
        return weight.at(placement.dim) if is_sharded else placement  # type: ignore[union-attr]

    return style.input or in_parts(sharding.input), style.output or in_parts(sharding.output)


def resolve_io_constraints(
    constraints: tuple[IOConstraint, ...], values: Mapping[str, ValueInfo] | None, axes: Axes
) -> dict[str, tuple[Placement | None, ...]]:
    """By path, the placement of each named value along each axis; None: no constraint."""
    resolved: dict[str, list[Placement | None]] = {}
    for constraint in sorted(constraints, key=lambda constraint: _breadth(constraint, values)):
        by_position = axes.spread(constraint.by_axis, constraint.in_order, constraint.location)
        for path in _io_paths(constraint, values):
            placements = resolved.setdefault(path, [None] * len(axes.sizes))
            for position, placement in by_position.items():
                if placements[position] is None:
                    placements[position] = _check_dim(constraint, path, placement, values)
    return {path: tuple(placements) for path, placements in resolved.items()}


def _breadth(constraint: IOConstraint, values: Mapping[str, ValueInfo] | None) -> int:
    """The order of precedence: a single value, then what contains it, then patterns."""
    if is_pattern(constraint.key):
        return 2
    return 0 if values is None or constraint.key in values else 1


def _io_paths(constraint: IOConstraint, values: Mapping[str, ValueInfo] | None) -> list[str]:
    """The values that the key names: by its path, name or position, or all tensors below it."""
    if values is None:
        return [constraint.key]
    paths = list(values)
    if constraint.key in values:
        return [constraint.key]
    named = [path for path in paths if values[path].alias == constraint.key]
    if named:
        return named
    if constraint.key.isdecimal() and int(constraint.key) < len(paths):
        return [paths[int(constraint.key)]]
    below = [
        path
        for path in paths
        if path.startswith(f"{constraint.key}.")
        or (is_pattern(constraint.key) and matches_name(constraint.key, path))
    ]
    tensors = [path for path in below if values[path].shape is not None]
    if not tensors:
        raise PlanError(
            f"{constraint.location} does not exist in the program. "
            f"{_suggest_path(constraint.key, paths)}"
        )
    return tensors


def _suggest_path(key: str, paths: list[str]) -> str:
    suggestions = get_close_matches(key, paths, n=1)
    if suggestions:
        return f"Did you mean {suggestions[0]!r}?"
    if not paths:
        return "It has none."
    shown = ", ".join(paths[:6]) + (" and others" if len(paths) > 6 else "")
    return f"It has {shown}."


def _check_dim(
    constraint: IOConstraint,
    path: str,
    placement: Placement,
    values: Mapping[str, ValueInfo] | None,
) -> Placement:
    """The placement with its dim counted from the front, where the value is known."""
    if values is None or isinstance(placement, Replicate):
        return placement
    shape = values[path].shape
    if shape is None:
        raise PlanError(
            f"{constraint.location} is not a tensor, so every rank gets all of it. Remove it."
        )
    if isinstance(placement, Shard):
        if not -len(shape) <= placement.dim < len(shape):
            raise PlanError(
                f"{constraint.location} is {describe_placement(placement)}, but {path!r} has "
                f"{len(shape)} dims. Give a dim that it has."
            )
        return placement.at(placement.dim % len(shape))
    return placement


def resolve(given: object, index: ProgramIndex, axes: Mapping[str, int]) -> ResolvedPlan:
    """Check a plan (anything that `Plan.of` takes) against a program and a mesh, and resolve it."""
    plan, mesh = Plan.of(given), Axes(axes)
    matcher = PlanMatcher(place_on_mesh(plan.entries, mesh))
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
        patterns=_patterns(weights, module_constraints),
    )
    _check_has_effect(resolved)
    return resolved


def _replicated_by_default(constraint: tuple[Placement | None, ...]) -> tuple[Placement, ...]:
    return tuple(Replicate() if placement is None else placement for placement in constraint)


def _patterns(
    weights: Weights, module_constraints: ModuleConstraints
) -> dict[str, tuple[str, ...]]:
    patterns: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for decision in weights.decisions:
        patterns[decision.name][decision.entry.pattern] = None
    for name, entries in module_constraints.entries.items():
        patterns[name].update(dict.fromkeys(entry.pattern for entry in entries))
    return {name: tuple(matched) for name, matched in patterns.items()}


def _check_matched(matcher: PlanMatcher[MeshEntry], index: ProgramIndex) -> None:
    """Raise PlanError if an entry matches no module or tensor of the program."""
    names = [*index.modules, *index.primary_names]
    matched = {entry.pattern for name in names for entry in matcher.find(name)}
    for entry in matcher.entries:
        if entry.pattern not in matched:
            kind = "module or tensor" if entry.is_pattern else "such module or tensor"
            verb = "that it matches" if entry.is_pattern else ""
            raise PlanError(
                f"The plan names {entry.pattern!r}, but the program has no {kind}"
                f"{' ' if verb else ''}{verb}{suggest_name(entry.pattern, names)}"
            )


def _check_effects(
    matcher: PlanMatcher[MeshEntry],
    index: ProgramIndex,
    weights: Weights,
    module_constraints: ModuleConstraints,
) -> None:
    """Raise PlanError if an entry has no effect: no sharding, no constraint, no exception."""
    effective = {
        entry.pattern for entries in module_constraints.entries.values() for entry in entries
    }
    used = set(effective)
    for decision in weights.decisions:
        used.add(decision.entry.pattern)
        if decision.dim is not None or decision.is_exception:
            effective.add(decision.entry.pattern)
    for entry in matcher.entries:
        if entry.pattern not in effective:
            raise PlanError(_describe_unused(entry, matcher, index, is_used=entry.pattern in used))


def _describe_unused(
    entry: MeshEntry, matcher: PlanMatcher[MeshEntry], index: ProgramIndex, *, is_used: bool
) -> str:
    if is_used:
        return (
            f"{entry.location} has no effect: what it names stays replicated anyway. Remove it, or "
            "give it a sharded placement."
        )
    names = [name for name in (*index.modules, *index.primary_names) if entry in matcher.find(name)]
    others = [
        other_entry
        for name in names
        for other_entry in matcher.find(name)
        if other_entry is not entry
    ]
    earlier = list(dict.fromkeys(repr(other_entry.pattern) for other_entry in others))
    if not any(name in index.modules for name in names):
        return describe_not_a_module(entry, names[0])
    if not earlier:
        return (
            f"{entry.location} has no effect: {names[0]!r} has no parameters or buffers itself. "
            "Name the layers in it, or remove the entry."
        )
    return (
        f"{entry.location} is never used: all that it names is decided by {_join_names(earlier)}. "
        "Remove it, or put it first; an exact name wins over any pattern."
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
