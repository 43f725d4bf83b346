"""One entry of a plan: a name or pattern, and what it says, along which axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from shardscope.errors import PlanError
from shardscope.parallel.placements import Partial, Placement, Shard
from shardscope.parallel.plan.spelling import is_placement, read_placement, read_placement_text, say
from shardscope.parallel.plan.style_names import style_named
from shardscope.parallel.plan.styles import (
    Colwise,
    ModuleInput,
    ModuleOutput,
    Replicated,
    Rowwise,
    Sequence,
    Style,
)
from shardscope.parallel.plan.tables import read_style_table
from shardscope.parallel.plan.torch_styles import is_torch_style, read_torch_style
from shardscope.record.patterns import is_pattern

__all__ = ["Entry", "Styles", "read_entry"]

Styles: TypeAlias = tuple[Style, ...]
"""What is said along one axis: at most one that lays out the parameters, and pins beside it."""

_OURS = (Colwise, Rowwise, Sequence, Replicated, ModuleInput, ModuleOutput)


@final
@dataclass(frozen=True, repr=False)
class Entry:
    """A pattern with styles by axis (None: the axis that the mesh leaves no doubt of).

    Or with `in_order`, a placement for each axis in the mesh's order.
    """

    pattern: str
    by_axis: tuple[tuple[str | None, Styles], ...] = ()
    in_order: tuple[Placement, ...] = ()

    @property
    def is_pattern(self) -> bool:
        """Whether it may match several names."""
        return is_pattern(self.pattern)

    def __repr__(self) -> str:
        return f"{self.pattern!r}: {self.meaning}"

    @property
    def meaning(self) -> str:
        """What it says, as Python code says it."""
        if self.in_order:
            return f"[{', '.join(map(say, self.in_order))}]"
        if self.by_axis[0][0] is None:
            return _say_styles(self.by_axis[0][1])
        said = [f"{axis!r}: {_say_styles(styles)}" for axis, styles in self.by_axis]
        return f"{{{', '.join(said)}}}"


def read_entry(pattern: Any, value: Any) -> Entry:
    """The entry that the user wrote as `pattern: value`."""
    if not isinstance(pattern, str):
        raise PlanError(
            f"The plan has the key {pattern!r}, which is {type(pattern).__name__}. Keys are names "
            "or patterns of modules and tensors, such as 'layers.*.wq'."
        )
    place = f"The plan's entry {pattern!r}"
    if isinstance(value, Mapping) and "style" not in value:
        return Entry(pattern, by_axis=_read_axes(value, place))
    if _is_row(value) and value and all(_means_placement(one) for one in value):
        return Entry(pattern, in_order=tuple(_read_raw(one, place) for one in value))
    return Entry(pattern, by_axis=((None, _read_styles(value, place)),))


def _read_axes(value: Mapping[Any, Any], place: str) -> tuple[tuple[str, Styles], ...]:
    if not value:
        raise PlanError(f"{place} is empty. Give placements, such as {{'tp': Shard(0)}}.")
    for axis, said in value.items():
        if not isinstance(axis, str):
            raise PlanError(
                f"{place} names the axis {axis!r}, which is {type(axis).__name__}. Axes of a mesh "
                "have names, such as 'tp'."
            )
        if isinstance(said, Mapping) and "style" not in said:
            raise PlanError(
                f"{place} gives a table for the axis {axis!r}. Give a style or a placement; in "
                f'TOML, write a name that has dots in quotes: "layers.0.wq".'
            )
    return tuple((axis, _read_styles(said, place)) for axis, said in value.items())


def _read_styles(value: Any, place: str) -> Styles:
    values = list(value) if _is_row(value) else [value]
    styles = tuple(style for one in values for style in _read_style(one, place))
    if not styles:
        raise PlanError(f"{place} has no style. Give one, such as Colwise(), or remove it.")
    for kinds, what in (
        ((Colwise, Rowwise, Sequence, Replicated, Shard), "layouts of the parameters"),
        ((ModuleInput,), "placements for the inputs"),
        ((ModuleOutput,), "placements for the outputs"),
    ):
        same = [style for style in styles if isinstance(style, kinds)]
        if len(same) > 1:
            raise PlanError(
                f"{place} gives {len(same)} {what} for one axis: {_say_styles(tuple(same))}. "
                "Keep one, or give one per axis: {'dp': …, 'tp': …}."
            )
    return styles


def _read_style(value: Any, place: str) -> Styles:
    if isinstance(value, type) and value in _OURS:
        return (value(),)
    if isinstance(value, _OURS):
        return (value,)
    if is_torch_style(value):
        return read_torch_style(value, place)
    if isinstance(value, Mapping):
        return (read_style_table(value, place),)
    if _means_placement(value):
        placement = _read_raw(value, place)
        return (placement if isinstance(placement, Shard) else Replicated(),)
    if isinstance(value, str):
        return (style_named(value, place),)
    raise PlanError(
        f"{place} gives {type(value).__name__}, which is neither a style nor a placement. Give "
        "one of them, such as Colwise() or Shard(0), or {axis: one of them}."
    )


def _read_raw(value: Any, place: str) -> Placement:
    """A placement for tensors: those that a program holds are whole or cut, never addends."""
    placement = read_placement(value, f"{place}'s placement")
    if isinstance(placement, Partial):
        raise PlanError(
            f"{place} gives {say(placement)}, but a parameter cannot be partial. Give "
            "Shard(dim) or Replicate()."
        )
    return placement


def _means_placement(value: Any) -> bool:
    if isinstance(value, str):
        return read_placement_text(value) is not None
    return is_placement(value)


def _is_row(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _say_styles(styles: Styles) -> str:
    said = [say(one) if isinstance(one, Shard) else repr(one) for one in styles]
    return said[0] if len(said) == 1 else f"[{', '.join(said)}]"
