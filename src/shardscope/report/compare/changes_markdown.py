"""Renders changes as Markdown tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from shardscope.record import Source
from shardscope.record.encoding import encode_json
from shardscope.record.units import format_count, plural
from shardscope.report.compare.changes import (
    Area,
    Change,
    Changes,
    Status,
    Unit,
    Value,
    hide_input_rows,
    name_path,
)
from shardscope.report.text.markdown_text import BoundedMarkdown, make_code, make_prose

_MAX_ROWS = 40
_WIDTH = 120
_MARKS = {True: "🔴", False: "🟢", None: "⚪"}


def render_changes_markdown(changes: Changes) -> str:
    """Render a comparison for a pull request."""
    document = BoundedMarkdown()
    write_changes(document, changes)
    return document.render()


def write_changes(document: BoundedMarkdown, changes: Changes) -> None:
    """Write a table of totals, then one for each area that changed."""
    titles = f"{make_code(changes.before)} → {make_code(changes.after)}"
    document.add(f"### What changed: {titles}")
    if changes.notes:
        document.add_list(changes.notes, make_prose)
    if not changes:
        document.add("No change.")
        return
    areas = [total for total in changes.totals if changes.of(total.area)]
    document.add_table(
        ["", "area", "before", "after", ">added", ">gone", ">changed"],
        areas,
        lambda total: [
            _grade(changes.of(total.area)),
            total.area.replace("-", " "),
            make_prose(total.before),
            make_prose(total.after),
            *(format_count(changes.count(total.area, status)) for status in Status),
        ],
    )
    for total in areas:
        _write_area(document, total.area, changes.of(total.area))


def _write_area(document: BoundedMarkdown, area: Area, rows: Sequence[Change]) -> None:
    rows_shown = hide_input_rows(rows)
    document.add(f"**{area.replace('-', ' ').capitalize()}**")
    has_modules = any(row.path is not None for row in rows_shown)
    side = "" if all(row.unit is Unit.WORDS for row in rows_shown) else ">"
    header = ["", *(["module"] if has_modules else []), "what", f"{side}before", f"{side}after"]
    document.add_table(header, rows_shown, lambda row: _make_row(row, has_modules), most=_MAX_ROWS)
    if len(rows_shown) < len(rows):
        document.add(
            f"Inputs changed in the same way ({plural(len(rows) - len(rows_shown), 'row')})."
        )


def _make_row(row: Change, has_modules: bool) -> list[str]:
    times = f" ×{row.repeat:,}" if row.repeat > 1 else ""
    because = row.because if row.status is not Status.GONE else ""
    label = make_code(row.what, width=_WIDTH)
    return [
        f"{_MARKS[row.is_worse]}&nbsp;{row.status}",
        *([_name(row) + times] if has_modules else []),
        f"{label}<br>{make_prose(because, width=2 * _WIDTH)}" if because else label,
        make_prose(row.show_before(), width=3 * _WIDTH),
        make_prose(row.show_after(), width=3 * _WIDTH),
    ]


def _name(row: Change) -> str:
    return make_code(row.path) if row.path else name_path(row.path)


def _grade(rows: Sequence[Change]) -> str:
    if any(row.is_worse for row in rows):
        return _MARKS[True]
    return _MARKS[False if any(row.is_worse is False for row in rows) else None]


FORMAT = "shardscope.changes"
SCHEMA = 1


class ChangeDocument(Struct, frozen=True, kw_only=True):
    """A change, with its derived values."""

    area: Area
    status: Status
    path: str | None
    modules: tuple[str, ...]
    repeat: int
    what: str
    before: Value | None
    after: Value | None
    unit: Unit
    delta: float
    is_worse: bool | None
    because: str
    source: Source | None
    axis: str = ""
    kind: str = ""
    phase: str = ""
    ranks: str = ""


class AreaDocument(Struct, frozen=True, kw_only=True):
    """An area's totals as text, and counts of its changes."""

    area: Area
    before: str
    after: str
    added: int
    gone: int
    changed: int


class ChangesDocument(Struct, frozen=True, kw_only=True):
    """A comparison as it is written to JSON."""

    before: str
    after: str
    areas: tuple[AreaDocument, ...]
    changes: tuple[ChangeDocument, ...]
    notes: tuple[str, ...] = ()
    format: str = FORMAT
    schema: int = SCHEMA


def encode_changes(changes: Changes) -> bytes:
    """Encode the comparison as indented JSON."""
    document = ChangesDocument(
        before=changes.before,
        after=changes.after,
        areas=tuple(
            AreaDocument(
                area=total.area,
                before=total.before,
                after=total.after,
                added=changes.count(total.area, Status.ADDED),
                gone=changes.count(total.area, Status.GONE),
                changed=changes.count(total.area, Status.CHANGED),
            )
            for total in changes.totals
        ),
        changes=tuple(map(_describe, changes.rows)),
        notes=changes.notes,
    )
    return msgspec.json.format(encode_json(document), indent=1) + b"\n"


def _describe(change: Change) -> ChangeDocument:
    return ChangeDocument(**asdict(change), status=change.status, delta=change.delta)
