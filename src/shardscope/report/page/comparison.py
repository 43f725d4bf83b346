"""Two recordings side by side, for the browser."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from shardscope.record import Recording
from shardscope.report.compare.changes import Area, AreaTotal, Change, Changes, Status, name_path
from shardscope.report.compare.compare import compare
from shardscope.report.compare.names import clean_names
from shardscope.report.names import shorten

__all__ = ["AreaSum", "ChangeRow", "Comparison", "build_comparison"]

_MAX_ROWS = 5_000  # more than anybody scrolls through; a file must stay small
_MAX_TEXT = 400  # characters of a value


class ChangeRow(Struct, frozen=True, kw_only=True):
    """Something that is not the same; `before` and `after` are for people, `delta` sorts."""

    area: int
    status: str  # added, gone, changed
    module: int  # of the second recording; -1 where it has none such
    path: str  # folded: `layers.{0…31}.attn`
    what: str
    before: str
    after: str
    delta: float  # after less before where they are numbers; none counts as zero
    is_worse: bool | None = None  # None where neither is better
    repeat: int = 1
    because: str = ""  # what led to it


class AreaSum(Struct, frozen=True, kw_only=True):
    """How much of one kind changed, and its totals."""

    name: str  # of the area: collectives, bytes, graph breaks, …
    before: str
    after: str
    num_added: int
    num_gone: int
    num_changed: int


class Comparison(Struct, frozen=True, kw_only=True):
    """What changed from one recording to the next."""

    before: str  # name of the file, or title
    after: str
    areas: tuple[AreaSum, ...]
    changes: tuple[ChangeRow, ...]
    notes: tuple[str, ...] = ()  # what could not be compared, and how the rest was
    left_out: int = 0  # changes that are not listed


def build_comparison(
    before: Recording,
    after: Recording,
    modules: Mapping[str, int],
    *,
    titles: tuple[str, str] = ("before", "after"),
) -> Comparison:
    """The changes from one recording to the page's own, whose modules have these positions."""
    changes = compare(before, after, titles=titles)
    _, names = clean_names(before, after)
    places = {names.clean(path): position for path, position in modules.items()}
    areas = changes.totals
    positions = {total.area: index for index, total in enumerate(areas)}
    return Comparison(
        before=changes.before,
        after=changes.after,
        areas=tuple(_sum_area(total, changes) for total in areas),
        changes=tuple(
            _make_row(row, positions[row.area], places) for row in changes.rows[:_MAX_ROWS]
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


def _make_row(row: Change, area: int, places: Mapping[str, int]) -> ChangeRow:
    return ChangeRow(
        area=area,
        status=row.status,
        module=next((places[name] for name in row.modules if name in places), -1),
        path=name_path(row.path),
        what=shorten(row.what, _MAX_TEXT),
        before=shorten(row.show_before(), _MAX_TEXT) if row.before is not None else "",
        after=shorten(row.show_after(), _MAX_TEXT) if row.after is not None else "",
        delta=row.delta,
        is_worse=row.is_worse,
        repeat=row.repeat,
        because=shorten(row.because, _MAX_TEXT),
    )
