"""The mesh's axes as a plan names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TypeVar, final

from shardscope.errors import PlanError

__all__ = ["Axes"]

_T = TypeVar("_T")

_DEFAULT = "tp"


@final
class Axes:
    """Names and sizes in the mesh's order; finds the axis that a part of a plan is for."""

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
        self, by_axis: Sequence[tuple[str | None, _T]], in_order: Sequence[_T], place: str
    ) -> dict[int, _T]:
        """By the axis' position, what was said at `place` along it."""
        if in_order and len(in_order) != len(self.names):
            raise PlanError(
                f"{place} gives {_count(len(in_order), 'placement')}, but the mesh has "
                f"{_count(len(self.names), 'axis')}: {self.said}. Give one for each, or name "
                "the axis: {'" + self.names[-1] + "': …}."
            )
        if in_order:
            return dict(enumerate(in_order))
        return {self._position(axis, place): said for axis, said in by_axis}

    @property
    def said(self) -> str:
        """`dp=2 and tp=4`."""
        return " and ".join(map(self.say, range(len(self.names))))

    def say(self, position: int) -> str:
        """`tp=4`."""
        return f"{self.names[position]}={self.sizes[position]}"

    def _position(self, axis: str | None, place: str) -> int:
        if axis is None:
            return self._only(place)
        if axis not in self.names:
            near = get_close_matches(axis, self.names, n=1)
            remedy = f"Did you mean {near[0]!r}?" if near else "Name one of them."
            raise PlanError(
                f"{place} is for the axis {axis!r}, but the mesh has {self.said}. {remedy}"
            )
        return self.names.index(axis)

    def _only(self, place: str) -> int:
        if _DEFAULT in self.names:
            return self.names.index(_DEFAULT)
        if len(self.names) > 1:
            raise PlanError(
                f"{place} does not name an axis, and the mesh has {self.said}. Write {{'"
                + self.names[-1]
                + "': …} around it."
            )
        return 0


def _count(number: int, noun: str) -> str:
    many = {"axis": "axes"}.get(noun, f"{noun}s")
    return f"{number} {noun if number == 1 else many}"
