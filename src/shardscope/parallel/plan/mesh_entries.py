"""The entries of a plan on a mesh: which axis each style is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar, final

from shardscope.errors import PlanError
from shardscope.plan import Entry
from shardscope.plan.placements import Shard
from shardscope.plan.styles import Replicated, Styles
from shardscope.record.patterns import is_pattern

_T = TypeVar("_T")

_DEFAULT_AXIS = "tp"


@final
class Axes:
    """The mesh's axes, names and sizes in order; finds the axis that a part of a plan is for."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.names = tuple(sizes)
        self.sizes = tuple(sizes.values())
        if not sizes:
            raise PlanError("The mesh has no axes. Give one, such as {'tp': 4}.")
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise PlanError(
                    f"The mesh's axis {name!r} has size {size!r}. Give it at least one rank."
                )

    def spread(
        self, by_axis: Sequence[tuple[str | None, _T]], in_order: Sequence[_T], location: str
    ) -> dict[int, _T]:
        """By position of the axis, the styles or placements that the plan has at `location`."""
        if in_order and len(in_order) != len(self.names):
            raise PlanError(
                f"{location} gives {_count(len(in_order), 'placement')}, but the mesh has "
                f"{_count(len(self.names), 'axis')}: {self.description}. Give one for each, or "
                "name "
                "the axis: {'" + self.names[-1] + "': …}."
            )
        if in_order:
            return dict(enumerate(in_order))
        return {self._position(axis, location): value for axis, value in by_axis}

    @property
    def description(self) -> str:
        """E.g. `dp=2 and tp=4`."""
        return " and ".join(map(self.describe_axis, range(len(self.names))))

    def describe_axis(self, position: int) -> str:
        """E.g. `tp=4`."""
        return f"{self.names[position]}={self.sizes[position]}"

    def _position(self, axis: str | None, location: str) -> int:
        if axis is None:
            return self._default_position(location)
        if axis not in self.names:
            suggestions = get_close_matches(axis, self.names, n=1)
            remedy = f"Did you mean {suggestions[0]!r}?" if suggestions else "Name one of them."
            raise PlanError(
                f"{location} is for the axis {axis!r}, but the mesh has {self.description}. "
                f"{remedy}"
            )
        return self.names.index(axis)

    def _default_position(self, location: str) -> int:
        if _DEFAULT_AXIS in self.names:
            return self.names.index(_DEFAULT_AXIS)
        if len(self.names) > 1:
            raise PlanError(
                f"{location} does not name an axis, and the mesh has {self.description}. Write {{'"
                + self.names[-1]
                + "': …} around it."
            )
        return 0


def _count(number: int, noun: str) -> str:
    many = {"axis": "axes"}.get(noun, f"{noun}s")
    return f"{number} {noun if number == 1 else many}"


@final
@dataclass(frozen=True, eq=False)
class MeshEntry:
    """An entry of a plan, with its styles by position of the mesh axis."""

    entry: Entry
    styles_by_axis: dict[int, Styles]

    @property
    def pattern(self) -> str:
        return self.entry.pattern

    @property
    def is_pattern(self) -> bool:
        """Whether it may match several names."""
        return self.entry.is_pattern

    @property
    def location(self) -> str:
        """The beginning of a sentence about the entry."""
        return f"The plan's entry {self.description}"

    @property
    def description(self) -> str:
        """The pattern and the styles as Python code."""
        return f"{self.pattern!r}: {self.entry.meaning}"

    @property
    def ends_in_wildcard(self) -> bool:
        """Whether it ends in a wildcard, and so may match modules that it is not meant for."""
        return is_pattern(self.pattern.rpartition(".")[2])


def place_on_mesh(entries: Sequence[Entry], axes: Axes) -> list[MeshEntry]:
    """The entries with their styles by mesh axis; raises PlanError for an axis that is missing."""
    return [MeshEntry(entry, _spread(entry, axes)) for entry in entries]


def _spread(entry: Entry, axes: Axes) -> dict[int, Styles]:
    row: list[Styles] = [
        (placement if isinstance(placement, Shard) else Replicated(),)
        for placement in entry.in_order
    ]
    return axes.spread(entry.by_axis, row, f"The plan's entry {entry.pattern!r}")
