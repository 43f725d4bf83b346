"""How the program's own inputs and outputs shall lie: what the user wrote, and what it comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, final

from shardscope.errors import PlanError
from shardscope.parallel.placements import Partial, Placement, Replicate, Shard
from shardscope.parallel.plan.axes import Axes
from shardscope.parallel.plan.outline import ValueOutline
from shardscope.parallel.plan.spelling import read_placement, say, spell
from shardscope.parallel.plan.tables import Plain
from shardscope.record.patterns import is_pattern, matches_deeply

__all__ = ["Wish", "read_wish", "resolve_wishes"]


@final
@dataclass(frozen=True, repr=False)
class Wish:
    """A path or position with placements by axis (None: the only one), or one for each axis."""

    side: str  # inputs or outputs
    key: str
    by_axis: tuple[tuple[str | None, Placement], ...] = ()
    in_order: tuple[Placement, ...] = ()

    @property
    def place(self) -> str:
        return f"The plan's {self.side[:-1]} {self.key!r}"

    def plain(self) -> Plain:
        """As TOML has it."""
        if self.in_order:
            return [spell(one) for one in self.in_order]
        if self.by_axis[0][0] is None:
            return spell(self.by_axis[0][1])
        return {str(axis): spell(one) for axis, one in self.by_axis}

    def __repr__(self) -> str:
        if self.in_order:
            return f"{self.key!r}: [{', '.join(map(say, self.in_order))}]"
        if self.by_axis[0][0] is None:
            return f"{self.key!r}: {say(self.by_axis[0][1])}"
        said = ", ".join(f"{axis!r}: {say(one)}" for axis, one in self.by_axis)
        return f"{self.key!r}: {{{said}}}"


def read_wish(key: Any, value: Any, *, side: str) -> Wish:
    """What the user wrote as `key: value` under `inputs` or `outputs`."""
    if isinstance(key, bool) or not isinstance(key, (str, int)) or (key != 0 and not key):
        raise PlanError(
            f"The plan's {side} have the key {key!r}. Give a path, such as 'batch.ids', or a "
            "position, such as 0."
        )
    wish = Wish(side, str(key))
    if isinstance(value, Mapping):
        if not value:
            raise PlanError(f"{wish.place} is empty. Give placements, such as {{'dp': Shard(0)}}.")
        read = tuple((str(axis), _read(wish, one)) for axis, one in value.items())
        return Wish(side, wish.key, by_axis=read)
    if isinstance(value, (list, tuple)) and value:
        return Wish(side, wish.key, in_order=tuple(_read(wish, one) for one in value))
    return Wish(side, wish.key, by_axis=((None, _read(wish, value)),))


def _read(wish: Wish, value: Any) -> Placement:
    placement = read_placement(value, f"{wish.place}'s placement")
    if isinstance(placement, Partial) and wish.side == "inputs":
        raise PlanError(
            f"{wish.place} is {say(placement)}, but an input cannot be partial. Give Shard(dim) "
            "or Replicate()."
        )
    return placement


def resolve_wishes(
    wishes: tuple[Wish, ...], values: Mapping[str, ValueOutline] | None, axes: Axes
) -> dict[str, tuple[Placement | None, ...]]:
    """By path, how each value that is spoken of shall lie along each axis; None: not said."""
    placed: dict[str, list[Placement | None]] = {}
    for wish in sorted(wishes, key=lambda one: _breadth(one, values)):
        said = axes.spread(wish.by_axis, wish.in_order, wish.place)
        for path in _paths(wish, values):
            pin = placed.setdefault(path, [None] * len(axes.sizes))
            for position, placement in said.items():
                if pin[position] is None:
                    pin[position] = _fitted(wish, path, placement, values)
    return {path: tuple(pin) for path, pin in placed.items()}


def _breadth(wish: Wish, values: Mapping[str, ValueOutline] | None) -> int:
    """A single value is spoken of before what it is in, and that before patterns."""
    if is_pattern(wish.key):
        return 2
    return 0 if values is None or wish.key in values else 1


def _paths(wish: Wish, values: Mapping[str, ValueOutline] | None) -> list[str]:
    """The values that the key means: one by its path, name or position, or all beneath it."""
    if values is None:
        return [wish.key]
    paths = list(values)
    if wish.key in values:
        return [wish.key]
    named = [path for path in paths if values[path].alias == wish.key]
    if named:
        return named
    if wish.key.isdecimal() and int(wish.key) < len(paths):
        return [paths[int(wish.key)]]
    beneath = [
        path
        for path in paths
        if path.startswith(f"{wish.key}.")
        or (is_pattern(wish.key) and matches_deeply(wish.key, path))
    ]
    tensors = [path for path in beneath if values[path].shape is not None]
    if not tensors:
        raise PlanError(f"{wish.place} does not exist in the program. {_suggest(wish.key, paths)}")
    return tensors


def _suggest(key: str, paths: list[str]) -> str:
    near = get_close_matches(key, paths, n=1)
    if near:
        return f"Did you mean {near[0]!r}?"
    if not paths:
        return "It has none."
    shown = ", ".join(paths[:6]) + (" and others" if len(paths) > 6 else "")
    return f"It has {shown}."


def _fitted(
    wish: Wish, path: str, placement: Placement, values: Mapping[str, ValueOutline] | None
) -> Placement:
    """The placement with its dim counted from the front, where the value is known."""
    if values is None or isinstance(placement, Replicate):
        return placement
    shape = values[path].shape
    if shape is None:
        raise PlanError(f"{wish.place} is not a tensor, so every rank gets all of it. Remove it.")
    if isinstance(placement, Shard):
        if not -len(shape) <= placement.dim < len(shape):
            raise PlanError(
                f"{wish.place} is {say(placement)}, but {path!r} has {len(shape)} dims. Give a dim "
                "that it has."
            )
        return placement.at(placement.dim % len(shape))
    return placement
