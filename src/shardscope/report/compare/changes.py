"""The result of a comparison: what was added, removed or changed, and filters on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from shardscope.drawing import draw_inline
from shardscope.record import Record, Source
from shardscope.record.patterns import matches_inside
from shardscope.record.text import sanitize_text
from shardscope.record.units import format_bytes, plural

NO_MODULE = "outside any module"
ROOT = "the model itself"
_MAX_LINES = 200  # lines of a comparison as text

Value = int | float | str


class Area(StrEnum):
    """The subject of a change, in the order in which areas are shown."""

    FINDINGS = "findings"
    GAPS = "gaps"
    COLLECTIVES = "collectives"
    BYTES = "bytes"
    CAUSES = "causes"
    MEMORY = "memory"
    GRAPH_BREAKS = "graph-breaks"
    PLACEMENTS = "placements"
    COVERAGE = "coverage"
    PARITY = "parity"
    PARALLEL = "parallel"
    DIAGNOSES = "diagnoses"
    RUN = "run"


class Unit(StrEnum):
    """The unit of a compared value."""

    COUNT = "count"
    BYTES = "bytes"
    WORDS = "words"


class Status(StrEnum):
    """How the two recordings differ."""

    ADDED = "added"  # only the second has it
    GONE = "gone"  # only the first has it
    CHANGED = "changed"


class Change(Record, frozen=True, kw_only=True, gc=False):
    """A value that differs between two recordings; None if one of them does not have it.

    `path` is the module, the empty string for the root and None for no module. If `repeat`
    identical layers changed in the same way, they are folded: `layers.{0…31}.attn`. `modules` are
    their clean names. `because` is the reason for the change, if it is known. `axis`, `kind` and
    `phase` are those of the collectives that it is about, and `ranks` has it; empty if there are
    none, or if all ranks that were compared have it.
    """

    area: Area
    what: str
    before: Value | None
    after: Value | None
    unit: Unit = Unit.COUNT
    path: str | None = None
    modules: tuple[str, ...] = ()
    repeat: int = 1
    is_worse: bool | None = None  # None where neither is better
    because: str = ""
    source: Source | None = None  # of the second recording, where a line is known
    axis: str = ""
    kind: str = ""
    phase: str = ""
    ranks: str = ""

    @property
    def status(self) -> Status:
        """Whether the value was added, removed or changed."""
        if self.before is None:
            return Status.ADDED
        return Status.GONE if self.after is None else Status.CHANGED

    @property
    def delta(self) -> float:
        """The second value minus the first, per folded layer; a missing value counts as zero."""
        before, after = (value or 0 for value in (self.before, self.after))
        if isinstance(before, str) or isinstance(after, str):
            return 0
        return after - before

    def __str__(self) -> str:
        """`layers.{0…31}.attn ×32: all_reduce[tp] in forward: 1 → 2`, on one line."""
        times = f" ×{self.repeat}" if self.repeat > 1 else ""
        location = f"{name_path(self.path)}{times}: " if self.path is not None else ""
        return sanitize_text(f"{location}{self.what}: {self.show_before()} → {self.show_after()}")

    def show_before(self) -> str:
        """Format the first recording's value."""
        return format_value(self.before, self.unit)

    def show_after(self) -> str:
        """Format the second recording's value."""
        return format_value(self.after, self.unit)


class AreaTotal(Record, frozen=True, kw_only=True, gc=False):
    """The totals of an area that both recordings have, as one short text each."""

    area: Area
    before: str
    after: str


class Changes(Struct, frozen=True, kw_only=True):
    """All changes from one recording to another. True if there are any."""

    before: str  # what the recordings are called
    after: str
    totals: tuple[AreaTotal, ...]
    rows: tuple[Change, ...]
    notes: tuple[str, ...] = ()  # what could not be compared, and how ranks were matched
    modules: tuple[str, ...] = ()  # clean names of all modules of either recording

    def __bool__(self) -> bool:
        return bool(self.rows)

    def __repr__(self) -> str:
        areas = ", ".join(dict.fromkeys(row.area for row in self.rows))
        return f"<Changes: {_count(self)}{f' of {areas}' if areas else ''}>"

    def __str__(self) -> str:
        """One line for each area, then one for each change; `show` prints a table."""
        return "\n".join(_limit(list(_describe(self))))

    def _repr_html_(self) -> str:
        """The tables that `show` prints, for notebooks."""
        return draw_inline(self)

    def of(self, area: Area) -> tuple[Change, ...]:
        """List the changes of one area."""
        return tuple(row for row in self.rows if row.area is area)

    def count(self, area: Area, status: Status) -> int:
        """Count the changes of an area with this status; each folded layer counts."""
        return sum(row.repeat for row in self.rows if row.area is area and row.status is status)

    def keep(self, wanted: Callable[[Change], bool]) -> Changes:
        """Return a comparison with only the changes for which `wanted` is true."""
        return replace(self, rows=tuple(filter(wanted, self.rows)))

    def only_areas(self, areas: Iterable[Area]) -> Changes:
        """Return a comparison of these areas alone."""
        area_set = set(areas)
        totals = tuple(total for total in self.totals if total.area in area_set)
        return replace(self.keep(lambda row: row.area in area_set), totals=totals)

    def only_modules(self, pattern: str) -> Changes:
        """Return a comparison of the modules that match (`layers.*.attn`) and those inside them."""
        return self.keep(lambda row: any(matches_inside(pattern, name) for name in row.modules))

    def has_module(self, pattern: str) -> bool:
        """Whether a module of either recording matches the pattern."""
        return any(matches_inside(pattern, name) for name in self.modules)

    def beyond(self, tolerance: float) -> Changes:
        """Leave out byte counts that changed by no more than this fraction."""
        return self.keep(lambda row: not _is_within(row, tolerance))


def name_path(path: str | None) -> str:
    """Format a module path; the root and no module have names of their own."""
    return path or ("" if path is None else ROOT)


def format_value(value: Value | None, unit: Unit) -> str:
    """Format a value with its unit; a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    return format_bytes(int(value)) if unit is Unit.BYTES else f"{value:,}"


def _is_within(row: Change, tolerance: float) -> bool:
    if row.unit is not Unit.BYTES or row.status is not Status.CHANGED:
        return False
    assert isinstance(row.before, int | float)
    return abs(row.delta) <= tolerance * row.before


def _describe(changes: Changes) -> Iterator[str]:
    yield sanitize_text(f"{changes.before} → {changes.after}: {_count(changes)}")
    yield from (f"note: {note}" for note in changes.notes)
    for total in changes.totals:
        rows = changes.of(total.area)
        if rows:
            yield sanitize_text(f"{total.area}: {total.before} → {total.after}")
            yield from (f"  {_sign(row)} {row}" for row in rows)


def _count(changes: Changes) -> str:
    count = sum(row.repeat for row in changes.rows)
    return plural(count, "change") if count else "no change"


def _sign(row: Change) -> str:
    return {Status.ADDED: "+", Status.GONE: "-", Status.CHANGED: "~"}[row.status]


def _limit(lines: list[str]) -> list[str]:
    if len(lines) <= _MAX_LINES:
        return lines
    return [*lines[:_MAX_LINES], f"… {len(lines) - _MAX_LINES:,} more"]


WIRE = ", sent"
INPUT = ", input"
AT_PEAK = " at the peak"


def hide_input_rows(rows: Sequence[Change]) -> list[Change]:
    """Leave out rows on input bytes that have a row on sent bytes beside them."""
    known = {(row.path, row.what, row.status) for row in rows if WIRE in row.what}
    return [
        row
        for row in rows
        if row.area is not Area.BYTES
        or (row.path, row.what.replace(INPUT, WIRE), row.status) not in known
        or WIRE in row.what
    ]


def shorten_label(row: Change) -> str:
    """Describe a row without what the title of its area states already."""
    ending = {Area.BYTES: WIRE, Area.MEMORY: AT_PEAK}.get(row.area, "")
    return row.what.replace(ending, "")
