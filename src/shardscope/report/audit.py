"""What each rank holds: the sharded module tree, and every parameter with its placements."""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct
from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from shardscope.record import Mark, MarkKind, Parameter, Recording
from shardscope.report.grid import Column, Grid, Look, Row, leave_out
from shardscope.report.heading import name_holder
from shardscope.report.holdings import sum_holdings
from shardscope.report.layout import make_text, make_title, plural
from shardscope.report.sharded_tree import FULLY_SHARDED, TreeLine, list_tree
from shardscope.report.units import UNKNOWN, format_bytes

__all__ = ["render_audit"]

_MAX_LINES = 80
_INDENT = 4
_MAX_DEPTH = 8  # of the indentation
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")
_COLUMNS = {
    "name": Column("parameter", Look.NAME, 28),
    "shape": Column("shape"),
    "dtype": Column("dtype", Look.NAME, 8),
    "lies": Column("placements", Look.NAME, 16),
    "group": Column("FSDP group", Look.NAME, 10),
    "rule": Column("rule", Look.NAME, 8),
    "tied": Column("tied to", Look.NAME, 8),
    "whole": Column("global"),
    "here": Column("local"),
}
_GROUPS = (MarkKind.FULLY_SHARD, MarkKind.FSDP1)
_WORDS = {
    MarkKind.DDP: "DDP",
    MarkKind.COMPILED: "compiled",
    MarkKind.CHECKPOINTED: "checkpointed",
}


class _Row(Struct, frozen=True):
    """Parameters of layers that are alike."""

    name: str
    count: int
    parameter: Parameter


def render_audit(recording: Recording, *, is_folded: bool = True) -> Iterator[RenderableType]:
    """The tree, then the table, under titles."""
    yield make_title("Sharded modules", _describe_total(recording))
    lines = list_tree(recording.modules, is_folded=is_folded)
    shown = lines[:_MAX_LINES] if is_folded else lines
    yield from (_render_line(line) for line in shown)
    if len(shown) < len(lines):
        yield Text(f"… {len(lines) - len(shown):,} more: --no-fold shows all", "dim")
    rows = list(_list_parameters(recording, is_folded=is_folded))
    if rows:
        yield make_title("Parameters and buffers", "S: sharded, R: replicated; local: on one rank")
        yield _render_parameters(rows, is_folded=is_folded)


def _describe_total(recording: Recording) -> str:
    held = sum_holdings(recording)
    if held is None:
        return "parameters were not recorded"
    count = plural(held.num_parameters, "parameter")
    if held.global_bytes is None or held.local_bytes is None:
        return f"{count}; sizes were not recorded"
    whole, here = format_bytes(held.global_bytes), format_bytes(held.local_bytes)
    if not held.num_parameters:
        return count
    return f"{count}, {whole} in all, {here} on {name_holder(recording.run)}"


def _render_line(line: TreeLine) -> RenderableType:
    text = make_text(line.label, width=120)
    if line.repeat > 1:
        text.append(f" ×{line.repeat}", "bold")
    if line.is_fully_sharded:
        text.append(f" {FULLY_SHARDED}", "bold green")
    # Short marks come first, long ones may wrap.
    for mark in sorted(line.module.marks, key=lambda mark: mark.kind in _GROUPS):
        text.append("  ").append_text(_render_mark(mark))
    if line.module.aliases:
        text.append("  ").append_text(make_text(f"also {', '.join(line.module.aliases)}", "dim"))
    return Padding(text, (0, 0, 0, _INDENT * min(line.depth, _MAX_DEPTH)), expand=False)


def _render_mark(mark: Mark) -> Text:
    over = f" over {' × '.join(mark.axes)}" if mark.axes else ""
    if mark.kind in _GROUPS:
        name = "FSDP2" if mark.kind is MarkKind.FULLY_SHARD else "FSDP1"
        number = mark.num_parameters
        count = "" if number is None else plural(number, "parameter")
        return make_text(", ".join(filter(None, [f"{name}{over}", count, mark.detail])), "dim")
    if mark.kind is MarkKind.TENSOR_PARALLEL:
        return make_text(f"{mark.detail}{over}", "cyan")
    return make_text(_WORDS[mark.kind] + over, "magenta")


def _list_parameters(recording: Recording, *, is_folded: bool) -> Iterator[_Row]:
    rows: dict[object, list[tuple[str, Parameter]]] = {}
    for module in recording.modules:
        for one in module.parameters:
            name = f"{module.name}.{one.name}".lstrip(".")
            pattern = _INDEX.sub("*", name) if is_folded else name
            facts = (one.shape, one.local_shape, one.dtype, one.placements, one.axes, one.rule)
            key = (pattern, *facts) if is_folded else (pattern, *facts, module.ranks)
            rows.setdefault(key, []).append((name, one))
    for same in rows.values():
        name, one = same[0]
        yield _Row(_INDEX.sub("*", name) if len(same) > 1 else name, len(same), one)


def _render_parameters(rows: list[_Row], *, is_folded: bool) -> RenderableType:
    shown = rows[:_MAX_LINES] if is_folded else rows
    note = (
        f"… {len(rows) - len(shown):,} more: --no-fold shows all" if len(shown) < len(rows) else ""
    )
    layouts = leave_out(list(_COLUMNS), "rule", "dtype", "group", "tied", "shape")
    return Grid(_COLUMNS, [_make_row(row) for row in shown], layouts, note=note)


def _make_row(row: _Row) -> Row:
    one = row.parameter
    name = make_text(row.name, "dim" if one.is_buffer else "")
    if row.count > 1:
        name.append(f" ×{row.count}", "bold")
    return {
        "name": name,
        "shape": _format_shapes(one),
        "dtype": make_text(one.dtype),
        "lies": make_text(_format_placements(one)),
        "group": _format_group(row),
        "rule": make_text(one.rule or ""),
        "tied": make_text(one.alias_group or ""),
        "whole": UNKNOWN if one.global_bytes is None else format_bytes(one.global_bytes),
        "here": UNKNOWN if one.local_bytes is None else format_bytes(one.local_bytes),
    }


def _format_group(row: _Row) -> Text:
    group = row.parameter.fsdp_group
    if group is None:
        return Text()
    return make_text((_INDEX.sub("*", group) if row.count > 1 else group) or "(root)")


def _format_shapes(one: Parameter) -> str:
    shape, held = (_format_shape(shape) for shape in (one.shape, one.local_shape))
    return shape if shape == held else f"{shape} → {held}"


def _format_shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) if shape else "()"


def _format_placements(one: Parameter) -> str:
    if not one.placements:
        return "buffer" if one.is_buffer else ("flat" if one.fsdp_group is not None else "plain")
    placed = zip(one.axes, one.placements, strict=False)
    return " ".join(f"{axis}:{_abbreviate(placement)}" for axis, placement in placed)


def _abbreviate(placement: str) -> str:
    """`S(0)`, `R`, `P(sum)`, as torch prints them in its own errors."""
    name, bracket, rest = placement.removeprefix("Strided").partition("(")
    return {"Shard": "S", "Replicate": "R", "Partial": "P"}.get(name, name) + bracket + rest
