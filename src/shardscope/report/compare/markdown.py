"""Changes as Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence

from shardscope.report.compare.brief import leave_out_input
from shardscope.report.compare.changes import Area, Change, Changes, Status, Unit, name_path
from shardscope.report.inert_markdown import make_code, make_prose
from shardscope.report.layout import plural
from shardscope.report.paper import Paper
from shardscope.report.units import format_count

__all__ = ["render_changes_markdown", "write_changes"]

_MAX_ROWS = 40
_WIDTH = 120
_MARKS = {True: "🔴", False: "🟢", None: "⚪"}


def render_changes_markdown(changes: Changes) -> str:
    """A comparison for a pull request."""
    paper = Paper()
    write_changes(paper, changes)
    return paper.render()


def write_changes(paper: Paper, changes: Changes) -> None:
    """A table of totals, then one for each area that changed."""
    titles = f"{make_code(changes.before)} → {make_code(changes.after)}"
    paper.add(f"### What changed: {titles}")
    if changes.notes:
        paper.add_list(changes.notes, make_prose)
    if not changes:
        paper.add("No change.")
        return
    areas = [total for total in changes.totals if changes.of(total.area)]
    paper.add_table(
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
        _write_area(paper, total.area, changes.of(total.area))


def _write_area(paper: Paper, area: Area, rows: Sequence[Change]) -> None:
    kept = leave_out_input(rows)
    paper.add(f"**{area.replace('-', ' ').capitalize()}**")
    has_modules = any(row.path is not None for row in kept)
    side = "" if all(row.unit is Unit.WORDS for row in kept) else ">"
    header = ["", *(["module"] if has_modules else []), "what", f"{side}before", f"{side}after"]
    paper.add_table(header, kept, lambda row: _make_row(row, has_modules), most=_MAX_ROWS)
    if len(kept) < len(rows):
        paper.add(f"Inputs changed in the same way ({plural(len(rows) - len(kept), 'row')}).")


def _make_row(row: Change, has_modules: bool) -> list[str]:
    times = f" ×{row.repeat:,}" if row.repeat > 1 else ""
    because = row.because if row.status is not Status.GONE else ""
    what = make_code(row.what, width=_WIDTH)
    return [
        f"{_MARKS[row.is_worse]}&nbsp;{row.status}",
        *([_name(row) + times] if has_modules else []),
        f"{what}<br>{make_prose(because, width=2 * _WIDTH)}" if because else what,
        make_prose(row.show_before(), width=3 * _WIDTH),
        make_prose(row.show_after(), width=3 * _WIDTH),
    ]


def _name(row: Change) -> str:
    return make_code(row.path) if row.path else name_path(row.path)


def _grade(rows: Sequence[Change]) -> str:
    if any(row.is_worse for row in rows):
        return _MARKS[True]
    return _MARKS[False if any(row.is_worse is False for row in rows) else None]
