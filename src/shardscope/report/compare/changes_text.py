"""Renders changes for the terminal: totals first, then each area, regressions in red."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from shardscope.record.units import format_bytes, format_count, plural
from shardscope.report.compare.changes import (
    Area,
    Change,
    Changes,
    Status,
    Unit,
    hide_input_rows,
    name_path,
    shorten_label,
)
from shardscope.report.text.judgements import Concern, Judgement
from shardscope.report.text.style import make_text, make_title
from shardscope.report.text.summary import render_plain
from shardscope.report.text.table import Cell, Column, ColumnStyle, Grid, Row

_MAX_ROWS = 30
_MAX_LINES = 4  # lines of a value or a reason
_SIGNS = {Status.ADDED: "+", Status.GONE: "-", Status.CHANGED: "~"}
_STYLES = {True: "red", False: "green", None: ""}
_ARROW = " → "
_NOTES = {
    Area.BYTES: "sent (ring estimate)",
    Area.MEMORY: "at the peak",
}
_QUIET = (Area.FINDINGS, Area.CAUSES, Area.GAPS, Area.RUN)  # areas whose totals are not informative
_TOTALS = {
    "area": Column("", ColumnStyle.NAME, 12),
    "before": Column("before", ColumnStyle.NAME, 8),
    "after": Column("after", ColumnStyle.NAME, 8),
    "added": Column("added"),
    "gone": Column("gone"),
    "changed": Column("changed"),
}
_ALL_COVERS = ("module", "item", "before", "after", "delta", "why", "label", "change")
_COLUMNS = {
    "sign": Column("", ColumnStyle.NAME, 1),
    "module": Column("module", ColumnStyle.NAME, 28),
    "what": Column("what", ColumnStyle.PROSE, 26, covers=("item", "why")),
    "before": Column("before"),
    "after": Column("after"),
    "delta": Column("by"),
    "label": Column("what", ColumnStyle.NAME, 20),
    "item": Column("what", ColumnStyle.NAME, 30),
    "why": Column("because of", ColumnStyle.PROSE, 40),
    "change": Column("before → after", ColumnStyle.PROSE, 30),
    "labelled": Column("what", ColumnStyle.PROSE, 30, covers=("label", "change")),
    "all": Column("module, what and change", ColumnStyle.PROSE, 10, covers=_ALL_COVERS),
}
_FIGURES = [
    ["sign", "module", "item", "before", "after", "delta", "why"],
    ["sign", "module", "what", "before", "after", "delta"],
    ["sign", "module", "what", "before", "after"],
]
_BARE_FIGURES = [[key for key in layout if key != "why"] for layout in _FIGURES]
_WORDS = [["sign", "module", "label", "change"], ["sign", "module", "labelled"]]
_LAST = [["sign", "all"]]


def render_changes(changes: Changes, *, is_complete: bool = False) -> RenderableType:
    """Render titles, notes, totals and rows; `is_complete` shows every row."""
    return Group(*_render(changes, is_complete))


def render_changes_text(changes: Changes, *, is_complete: bool = False, width: int = 80) -> str:
    """Render changes as plain text, for files, tests and notebooks."""
    return render_plain(render_changes(changes, is_complete=is_complete), width=width)


def _render(changes: Changes, is_complete: bool) -> Iterator[RenderableType]:
    yield _render_heading(changes)
    yield from (make_text(f"note: {note}", "yellow") for note in changes.notes)
    if not changes:
        yield Text("\nNo change.", "bold green")
        return
    yield make_title("Totals", "of the busiest rank, where ranks differ")
    yield _render_totals(changes)
    for total in changes.totals:
        rows = changes.of(total.area)
        if rows:
            yield from _render_area(total.area, rows, is_complete)


def _render_heading(changes: Changes) -> Text:
    line = Text.assemble(("shardscope diff", "bold cyan"), (" · ", "dim"))
    line.append_text(make_text(changes.before, width=120)).append(_ARROW, "dim")
    return line.append_text(make_text(changes.after, width=120))


def _render_totals(changes: Changes) -> RenderableType:
    rows: list[Row] = []
    for total in changes.totals:
        if total.area in _QUIET and not changes.of(total.area):
            continue
        style = _grade(changes.of(total.area))
        counts: dict[str, Cell] = {
            status: format_count(changes.count(total.area, status)) for status in Status
        }
        rows.append(
            counts
            | {
                "area": _name(total.area),
                "before": make_text(total.before),
                "after": make_text(total.after, style),
            }
        )
    return Grid(_TOTALS, rows, [list(_TOTALS), ["area", "before", "after"]])


def _grade(rows: Sequence[Change]) -> str:
    if any(row.is_worse for row in rows):
        return _STYLES[True]
    return _STYLES[False] if any(row.is_worse is False for row in rows) else ""


def _name(area: Area) -> str:
    return area.replace("-", " ")


def _render_area(area: Area, rows: Sequence[Change], is_complete: bool) -> Iterator[RenderableType]:
    rows_shown = rows if is_complete else hide_input_rows(rows)
    shown = rows_shown if is_complete else rows_shown[:_MAX_ROWS]
    yield make_title(_name(area).capitalize(), _describe(area, rows))
    layouts = [*_choose_layouts(shown), *_LAST]
    yield Grid(
        _COLUMNS, list(_make_rows(shown)), layouts, note=_count_hidden(rows, rows_shown, shown)
    )


def _choose_layouts(rows: Sequence[Change]) -> list[list[str]]:
    if all(row.unit is Unit.WORDS for row in rows):
        return _WORDS
    return _FIGURES if any(map(_find_reason, rows)) else _BARE_FIGURES


def _find_reason(row: Change) -> str:
    """Return why the value is there; a removed value needs no reason."""
    return "" if row.status is Status.GONE else row.because


def _describe(area: Area, rows: Sequence[Change]) -> str:
    counts = {status: sum(row.repeat for row in rows if row.status is status) for status in Status}
    words = ", ".join(f"{count:,} {status}" for status, count in counts.items() if count)
    return "; ".join(filter(None, [words, _NOTES.get(area)]))


def _count_hidden(
    rows: Sequence[Change], rows_shown: Sequence[Change], shown: Sequence[Change]
) -> str:
    hidden = []
    if len(shown) < len(rows_shown):
        hidden.append(f"… {len(rows_shown) - len(shown):,} more")
    if len(rows_shown) < len(rows):
        hidden.append(f"{plural(len(rows) - len(rows_shown), 'row')} on inputs hidden")
    return f"{'; '.join(hidden)}: --no-fold shows all" if hidden else ""


def _make_rows(rows: Sequence[Change]) -> Iterator[Row]:
    last_reason = ""
    for row in rows:
        # Consecutive rows often have the same reason: show it once.
        because = _find_reason(row)
        yield _make_row(row, because if because != last_reason else "")
        last_reason = because or last_reason


def _make_row(row: Change, because: str) -> Row:
    style = _STYLES[row.is_worse]
    return {
        "sign": Text(_SIGNS[row.status], f"bold {style}".strip()),
        "module": _name_module(row),
        "what": lambda width: _stack(width, (shorten_label(row), ""), (because, "dim")),
        "before": make_text(row.show_before(), width=24),
        "after": make_text(row.show_after(), style, width=24),
        "delta": _format_delta(row, style),
        "label": make_text(row.what),
        "item": make_text(shorten_label(row)),
        "why": make_text(because, "dim"),
        "change": lambda width: Group(*_show_change(row, because, width)),
        "labelled": lambda width: Group(
            make_text(row.what, width=_MAX_LINES * width), *_show_change(row, because, width)
        ),
        "all": lambda width: Group(
            *([_name_module(row)] if row.path is not None else []),
            make_text(shorten_label(row), width=_MAX_LINES * width),
            *_show_change(row, because, width),
        ),
    }


def _stack(width: int, *lines: tuple[str, str]) -> RenderableType:
    return Group(
        *(make_text(text, style, width=_MAX_LINES * width) for text, style in lines if text)
    )


def _show_change(row: Change, because: str, width: int) -> Iterator[RenderableType]:
    """Yield `before → after`, or the only value if one is missing."""
    style, room = _STYLES[row.is_worse], _MAX_LINES * width
    if row.unit is Unit.WORDS and row.status is not Status.CHANGED:
        only = row.show_after() if row.before is None else row.show_before()
        yield make_text(only, style, width=room)
    else:
        line = make_text(row.show_before(), width=room).append(_ARROW, "dim")
        yield line.append_text(make_text(row.show_after(), style, width=room))
    if because:
        yield make_text(because, "dim", width=_MAX_LINES * width)


def _name_module(row: Change) -> Text:
    name = make_text(name_path(row.path))
    return name.append(f" ×{row.repeat:,}", "bold") if row.repeat > 1 else name


def _format_delta(row: Change, style: str) -> Text:
    if not row.delta:
        return Text()
    sign = "+" if row.delta > 0 else "-"
    size = abs(row.delta)
    return Text(sign + (format_bytes(int(size)) if row.unit is Unit.BYTES else f"{size:,}"), style)


def judge_changes(changes: Changes) -> Concern:
    """Judge a comparison: worse if anything got worse, wrong if results did."""
    worse = [row for row in changes.rows if row.is_worse]
    better = [row for row in changes.rows if row.is_worse is False]
    is_wrong = any(row.area in (Area.PARITY, Area.PARALLEL, Area.DIAGNOSES) for row in worse)
    totals = [
        f"{total.area.replace('-', ' ')} {total.before} → {total.after}"
        for total in changes.totals
        if total.area in (Area.BYTES, Area.COLLECTIVES, Area.MEMORY) and total.before != total.after
    ]
    num_changes = sum(row.repeat for row in changes.rows)
    fact = f"Against {changes.before}: no change"
    if changes.rows:
        fact = (
            f"Against {changes.before}: {plural(num_changes, 'change')}, "
            f"{sum(row.repeat for row in worse):,} for the worse and "
            f"{sum(row.repeat for row in better):,} for the better"
        )
    judgement = Judgement.WRONG if is_wrong else Judgement.COSTLY if worse else Judgement.FINE
    return Concern(
        judgement=judgement,
        rule="comparison",
        fact=fact,
        reason="; ".join(totals),
        view="compare",
    )
