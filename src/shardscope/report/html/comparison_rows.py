"""Data of the compare view: what changed from another recording to the page's."""

from __future__ import annotations

from collections.abc import Mapping

from shardscope.record import Recording
from shardscope.report.compare.changes import Area, AreaTotal, Change, Changes, Status, name_path
from shardscope.report.compare.compare_recordings import compare
from shardscope.report.compare.facts import clean_names
from shardscope.report.html.page import AreaSum, ChangeRow, Comparison
from shardscope.report.html.page_index import NOWHERE, Index
from shardscope.report.text.style import shorten

_MAX_ROWS = 5_000  # the file must stay small, and more rows are not read
_MAX_TEXT = 400  # characters of a value


def build_comparison(
    before: Recording,
    after: Recording,
    index: Index,
    *,
    titles: tuple[str, str] = ("before", "after"),
    changes: Changes | None = None,
) -> Comparison:
    """Compare `before` with the page's recording, whose modules and lines are in `index`.

    `changes` is the comparison, if it was made already.
    """
    changes = changes or compare(before, after, titles=titles)
    _, names = clean_names(before, after)
    positions_by_name = {names.clean(path): position for path, position in index.positions.items()}
    areas = changes.totals
    positions = {total.area: index for index, total in enumerate(areas)}
    return Comparison(
        before=changes.before,
        after=changes.after,
        areas=tuple(_sum_area(total, changes) for total in areas),
        changes=tuple(
            _make_row(row, positions[row.area], positions_by_name, index)
            for row in changes.rows[:_MAX_ROWS]
        ),
        notes=changes.notes,
        left_out=max(0, len(changes.rows) - _MAX_ROWS),
    )


def _sum_area(total: AreaTotal, changes: Changes) -> AreaSum:
    added, gone, changed = (changes.count(total.area, status) for status in Status)
    return AreaSum(
        name=_name(total.area),
        before=total.before,
        after=total.after,
        num_added=added,
        num_gone=gone,
        num_changed=changed,
    )


def _name(area: Area) -> str:
    return area.replace("-", " ")


def _make_row(
    row: Change, area: int, positions_by_name: Mapping[str, int], index: Index
) -> ChangeRow:
    return ChangeRow(
        area=area,
        status=row.status,
        module=next(
            (positions_by_name[name] for name in row.modules if name in positions_by_name), NOWHERE
        ),
        path=name_path(row.path),
        what=shorten(row.what, _MAX_TEXT),
        before=shorten(row.show_before(), _MAX_TEXT) if row.before is not None else "",
        after=shorten(row.show_after(), _MAX_TEXT) if row.after is not None else "",
        delta=row.delta,
        is_worse=row.is_worse,
        repeat=row.repeat,
        because=shorten(row.because, _MAX_TEXT),
        axis=row.axis,
        kind=row.kind,
        phase=row.phase,
        ranks=row.ranks,
        source=index.source(row.source),
    )
