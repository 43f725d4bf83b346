"""Placements of the program's own inputs and outputs: parsed from the plan, and resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, final

from shardscope.errors import PlanError
from shardscope.parallel.plan.match import Axes
from shardscope.parallel.plan.parse import TomlValue
from shardscope.parallel.plan.placement_syntax import (
    describe_placement,
    format_placement,
    read_placement,
)
from shardscope.parallel.plan.program_index import ValueInfo
from shardscope.plan.placements import Partial, Placement, Replicate, Shard
from shardscope.record.patterns import is_pattern, matches_deeply


@final
@dataclass(frozen=True, repr=False)
class IOConstraint:
    """A path or position, with placements by axis (None: the default one) or one for each axis."""

    side: str  # inputs or outputs
    key: str
    by_axis: tuple[tuple[str | None, Placement], ...] = ()
    in_order: tuple[Placement, ...] = ()

    @property
    def location(self) -> str:
        return f"The plan's {self.side[:-1]} {self.key!r}"

    def to_toml(self) -> TomlValue:
        """The placements as a TOML value."""
        if self.in_order:
            return [format_placement(placement) for placement in self.in_order]
        if self.by_axis[0][0] is None:
            return format_placement(self.by_axis[0][1])
        return {str(axis): format_placement(placement) for axis, placement in self.by_axis}

    def __repr__(self) -> str:
        if self.in_order:
            return f"{self.key!r}: [{', '.join(map(describe_placement, self.in_order))}]"
        if self.by_axis[0][0] is None:
            return f"{self.key!r}: {describe_placement(self.by_axis[0][1])}"
        placements = ", ".join(
            f"{axis!r}: {describe_placement(placement)}" for axis, placement in self.by_axis
        )
        return f"{self.key!r}: {{{placements}}}"


def read_io_constraint(key: Any, value: Any, *, side: str) -> IOConstraint:
    """Parse what the user wrote as `key: value` under `inputs` or `outputs`."""
    if isinstance(key, bool) or not isinstance(key, (str, int)) or (key != 0 and not key):
        raise PlanError(
            f"The plan's {side} have the key {key!r}. Give a path, such as 'batch.ids', or a "
            "position, such as 0."
        )
    constraint = IOConstraint(side, str(key))
    if isinstance(value, Mapping):
        if not value:
            raise PlanError(
                f"{constraint.location} is empty. Give placements, such as {{'dp': Shard(0)}}."
            )
        read = tuple((str(axis), _read(constraint, placement)) for axis, placement in value.items())
        return IOConstraint(side, constraint.key, by_axis=read)
    if isinstance(value, (list, tuple)) and value:
        return IOConstraint(
            side,
            constraint.key,
            in_order=tuple(_read(constraint, placement) for placement in value),
        )
    return IOConstraint(side, constraint.key, by_axis=((None, _read(constraint, value)),))


def _read(constraint: IOConstraint, value: Any) -> Placement:
    placement = read_placement(value, f"{constraint.location}'s placement")
    if isinstance(placement, Partial) and constraint.side == "inputs":
        raise PlanError(
            f"{constraint.location} is {describe_placement(placement)}, but an input cannot be "
            f"partial. Give Shard(dim) "
            "or Replicate()."
        )
    return placement


def resolve_io_constraints(
    constraints: tuple[IOConstraint, ...], values: Mapping[str, ValueInfo] | None, axes: Axes
) -> dict[str, tuple[Placement | None, ...]]:
    """By path, the placement of each named value along each axis; None: no constraint."""
    resolved: dict[str, list[Placement | None]] = {}
    for constraint in sorted(constraints, key=lambda constraint: _breadth(constraint, values)):
        by_position = axes.spread(constraint.by_axis, constraint.in_order, constraint.location)
        for path in _paths(constraint, values):
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


def _paths(constraint: IOConstraint, values: Mapping[str, ValueInfo] | None) -> list[str]:
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
        or (is_pattern(constraint.key) and matches_deeply(constraint.key, path))
    ]
    tensors = [path for path in below if values[path].shape is not None]
    if not tensors:
        raise PlanError(
            f"{constraint.location} does not exist in the program. "
            f"{_suggest(constraint.key, paths)}"
        )
    return tensors


def _suggest(key: str, paths: list[str]) -> str:
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
                f"{len(shape)} dims. Give a dim "
                "that it has."
            )
        return placement.at(placement.dim % len(shape))
    return placement
