"""The records of a comparison: what was added, what is gone, what changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from fnmatch import fnmatchcase

from msgspec import Struct
from msgspec.structs import replace

from shardscope.record import Record
from shardscope.report.layout import plural
from shardscope.report.names import make_inert
from shardscope.report.units import format_bytes

__all__ = [
    "NO_MODULE",
    "ROOT",
    "Area",
    "AreaTotal",
    "Change",
    "Changes",
    "Status",
    "Unit",
    "Value",
    "format_value",
    "name_path",
]

NO_MODULE = "outside any module"
ROOT = "the model itself"
_MAX_LINES = 200  # of a comparison as text

Value = int | float | str


class Area(StrEnum):
    """What a change is about, in the order in which people want to know."""

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
    """What a value is."""

    COUNT = "count"
    BYTES = "bytes"
    WORDS = "words"


class Status(StrEnum):
    """How the two recordings differ."""

    ADDED = "added"  # only the second has it
    GONE = "gone"  # only the first has it
    CHANGED = "changed"


class Change(Record, frozen=True, kw_only=True, gc=False):
    """Something that is not the same in both; None is what one of them does not have.

    `path` is the module, folded (`layers.{0…31}.attn`) where `repeat` modules changed alike; the
    root's is the empty string, None is no module. `modules` are their clean names. `because` is
    what led to it, where that is known.
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

    @property
    def status(self) -> Status:
        """Whether it was added, is gone, or is another."""
        if self.before is None:
            return Status.ADDED
        return Status.GONE if self.after is None else Status.CHANGED

    @property
    def delta(self) -> float:
        """After less before, of one of those that are folded; what is not there counts as zero."""
        before, after = (value or 0 for value in (self.before, self.after))
        if isinstance(before, str) or isinstance(after, str):
            return 0
        return after - before

    def __str__(self) -> str:
        """`layers.{0…31}.attn ×32: all_reduce[tp] in forward: 1 → 2`, on one line."""
        times = f" ×{self.repeat}" if self.repeat > 1 else ""
        place = f"{name_path(self.path)}{times}: " if self.path is not None else ""
        return make_inert(f"{place}{self.what}: {self.show_before()} → {self.show_after()}")

    def show_before(self) -> str:
        """The first recording's value, for people."""
        return format_value(self.before, self.unit)

    def show_after(self) -> str:
        """The second's."""
        return format_value(self.after, self.unit)


class AreaTotal(Record, frozen=True, kw_only=True, gc=False):
    """An area that both recordings know something of, in a few words each."""

    area: Area
    before: str
    after: str


class Changes(Struct, frozen=True, kw_only=True):
    """What changed from one recording to the other. True if anything did."""

    before: str  # what the recordings are called
    after: str
    totals: tuple[AreaTotal, ...]
    rows: tuple[Change, ...]
    notes: tuple[str, ...] = ()  # what could not be compared, and how the rest was
    modules: tuple[str, ...] = ()  # clean names of all that either recording has

    def __bool__(self) -> bool:
        return bool(self.rows)

    def __repr__(self) -> str:
        areas = ", ".join(dict.fromkeys(row.area for row in self.rows))
        return f"<Changes: {_count(self)}{f' of {areas}' if areas else ''}>"

    def __str__(self) -> str:
        """A line for each change, below one for each area; `show` prints a table."""
        return "\n".join(_limit(list(_describe(self))))

    def of(self, area: Area) -> tuple[Change, ...]:
        """The changes of one area."""
        return tuple(row for row in self.rows if row.area is area)

    def count(self, area: Area, status: Status) -> int:
        """How many things of an area were added, are gone, or changed; folded ones one by one."""
        return sum(row.repeat for row in self.rows if row.area is area and row.status is status)

    def keep(self, wanted: Callable[[Change], bool]) -> Changes:
        """The same with these changes alone."""
        return replace(self, rows=tuple(filter(wanted, self.rows)))

    def only_areas(self, areas: Iterable[Area]) -> Changes:
        """The same for these areas alone."""
        kept = set(areas)
        totals = tuple(one for one in self.totals if one.area in kept)
        return replace(self.keep(lambda row: row.area in kept), totals=totals)

    def only_modules(self, pattern: str) -> Changes:
        """The same for modules that match (`layers.*.attn`), and those inside them."""
        return self.keep(lambda row: any(_matches(pattern, name) for name in row.modules))

    def has_module(self, pattern: str) -> bool:
        """Whether a module of either recording matches."""
        return any(_matches(pattern, name) for name in self.modules)

    def beyond(self, tolerance: float) -> Changes:
        """The same without bytes that changed by no more than this share of what they were."""
        return self.keep(lambda row: not _is_within(row, tolerance))


def _matches(pattern: str, name: str) -> bool:
    """Whether the module, or one that it lies in, matches."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def name_path(path: str | None) -> str:
    """A module for people."""
    return path or ("" if path is None else ROOT)


def format_value(value: Value | None, unit: Unit) -> str:
    """A value with its unit; a dash for none."""
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
    yield make_inert(f"{changes.before} → {changes.after}: {_count(changes)}")
    yield from (f"note: {note}" for note in changes.notes)
    for total in changes.totals:
        rows = changes.of(total.area)
        if rows:
            yield make_inert(f"{total.area}: {total.before} → {total.after}")
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
