"""Styles as tables of plain values, as TOML has them: `{ style = "colwise", heads = 32 }`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shardscope.errors import PlanError
from shardscope.parallel.placements import Placement, Shard
from shardscope.parallel.plan.spelling import read_placement, spell
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

__all__ = ["Plain", "read_style_table", "style_table"]

Plain = str | int | list["Plain"] | dict[str, "Plain"]
"""What a table may hold."""

_NONE = "none"  # a pin that leaves the value as it comes; TOML has no null
_CUT_KEYS = {"input", "output", "fused", "heads"}


def read_style_table(table: Mapping[str, Any], place: str) -> Style:
    """The style that a table with the key `style` describes."""
    name, rest = table["style"], {key: value for key, value in table.items() if key != "style"}
    if not isinstance(name, str):
        raise PlanError(f"{place} gives style = {name!r}. Give its name, such as 'colwise'.")
    if name == "input":
        return _read_input(_only(rest, {"positional", "keyword"}, name, place), place)
    if name == "output":
        outputs = _only(rest, {"outputs"}, name, place).get("outputs", ())
        return ModuleOutput(*_read_pins(outputs, place))
    style = style_named(name, place)
    if isinstance(style, Sequence):
        return Sequence(**_only(rest, {"dim"}, name, place))
    if isinstance(style, (Colwise, Rowwise)):
        said = {key: value for key, value in vars(style).items() if value is not None}
        return type(style)(**{**said, **_only(rest, _CUT_KEYS, name, place)})
    _only(rest, set(), name, place)
    return style


def style_table(style: Style) -> Plain:
    """What `read_style_table` reads, or the bare name where that says it all."""
    if isinstance(style, Shard):
        return spell(style)
    if isinstance(style, ModuleInput):
        keyword: dict[str, Plain] = {name: spell(one) for name, one in style.keyword}
        positional = [_spell_pin(one) for one in style.positional]
        parts: dict[str, Plain] = {"positional": positional, "keyword": keyword}
        return {"style": "input", **{name: part for name, part in parts.items() if part}}
    if isinstance(style, ModuleOutput):
        return {"style": "output", "outputs": [_spell_pin(one) for one in style.outputs]}
    if isinstance(style, Sequence):
        return "sequence" if style == Sequence() else {"style": "sequence", "dim": style.dim}
    if isinstance(style, Replicated):
        return "replicate"
    name = type(style).__name__.lower()
    said = {key: _plain(value) for key, value in vars(style).items() if value is not None}
    return {"style": name, **said} if said else name


def _only(rest: Mapping[str, Any], allowed: set[str], name: str, place: str) -> Mapping[str, Any]:
    unknown = sorted(set(rest) - allowed)
    if unknown:
        takes = f"takes {', '.join(sorted(allowed))}" if allowed else "takes nothing"
        raise PlanError(f"{place} gives {unknown[0]!r} to the style {name!r}, which {takes}.")
    return rest


def _read_input(rest: Mapping[str, Any], place: str) -> ModuleInput:
    keyword = rest.get("keyword", {})
    if not isinstance(keyword, Mapping):
        raise PlanError(
            f"{place} gives keyword = {keyword!r}. Give a table of placements by argument, such "
            "as { mask = 'replicate' }."
        )
    names = dict(zip(keyword, _read_pins(keyword.values(), place), strict=True))
    return ModuleInput(*_read_pins(rest.get("positional", ()), place), **names)


def _read_pins(values: Any, place: str) -> list[Placement | None]:
    row = [values] if isinstance(values, str) else values
    if not isinstance(row, Iterable):
        raise PlanError(f"{place} gives {values!r} instead of a list of placements.")
    return [
        None if value is None or value == _NONE else read_placement(value, f"{place}'s placement")
        for value in row
    ]


def _spell_pin(placement: Placement | None) -> Plain:
    return _NONE if placement is None else spell(placement)


def _plain(value: Any) -> Plain:
    if isinstance(value, tuple):
        return list(value)
    return value if isinstance(value, int) else spell(value)
