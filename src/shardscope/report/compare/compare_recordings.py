"""Compares two recordings, section by section."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import TypeVar, final

from msgspec import Struct

from shardscope.record import Recording
from shardscope.report.compare.changes import Area, AreaTotal, Change, Changes
from shardscope.report.compare.compiler_changes import (
    compare_coverage,
    compare_diagnoses,
    compare_explanations,
    total_coverage,
    total_diagnoses,
    total_explanations,
)
from shardscope.report.compare.facts import clean_names, fold_changes
from shardscope.report.compare.memory_changes import (
    Holdings,
    compare_holdings,
    compare_memory,
    list_common_ranks,
    note_ranks,
    total_holdings,
    total_memory,
)
from shardscope.report.compare.program_changes import (
    compare_findings,
    compare_gaps,
    compare_parity,
    compare_programs,
    compare_runs,
    total_findings,
    total_gaps,
    total_parity,
    total_programs,
    total_runs,
)
from shardscope.report.compare.traffic_changes import CallTable, compare_traffic, total_traffic

_Part = TypeVar("_Part")


@final
class Pair:
    """Two recordings and data derived from both; in each pair, the first recording comes first."""

    def __init__(self, before: Recording, after: Recording) -> None:
        self.both = (before, after)
        self.common = list_common_ranks(before, after)
        self.names = clean_names(before, after)

    def take(self, read: Callable[[Recording], _Part]) -> tuple[_Part, _Part]:
        """Read the same part of both recordings."""
        return read(self.both[0]), read(self.both[1])

    @cached_property
    def calls(self) -> tuple[CallTable, CallTable]:
        """The collectives of both recordings."""
        before, after = self.both
        return CallTable(before, self.names[0]), CallTable(after, self.names[1])

    @cached_property
    def holdings(self) -> tuple[Holdings, Holdings]:
        """The parameters of both recordings."""
        before, after = self.both
        return (
            Holdings(before, self.names[0], self.common),
            Holdings(after, self.names[1], self.common),
        )

    @property
    def modules(self) -> tuple[str, ...]:
        """Clean names of all modules of either recording."""
        return tuple(sorted({*self.names[0].names, *self.names[1].names}))

    def note_ranks(self) -> str:
        """Describe which ranks are compared, unless that is obvious."""
        return note_ranks(*self.both, self.common)


class Section(Struct, frozen=True, kw_only=True):
    """The part of a recording that an instrument produced, compared if both recordings have it."""

    name: str
    is_known: Callable[[Recording], bool]
    compare: Callable[[Pair], Iterable[Change]]
    total: Callable[[Pair], Iterable[AreaTotal]]
    has_ranks: bool = False  # whether it is compared rank by rank


def _is_traced(recording: Recording) -> bool:
    """Whether collectives were recorded; without a list of instruments, a trace is assumed."""
    instruments = recording.run.instruments
    return bool(recording.collectives) or not instruments or "trace" in instruments


SECTIONS = (
    Section(
        name="run",
        is_known=lambda recording: True,
        compare=lambda pair: compare_runs(*pair.take(lambda recording: recording.run)),
        total=lambda pair: [total_runs(*pair.take(lambda recording: recording.run))],
    ),
    Section(
        name="findings",
        is_known=lambda recording: True,
        compare=lambda pair: compare_findings(*pair.both, pair.names),
        total=lambda pair: [total_findings(*pair.both)],
    ),
    Section(
        name="gaps",
        is_known=lambda recording: True,
        compare=lambda pair: compare_gaps(*pair.take(lambda recording: recording.gaps)),
        total=lambda pair: [total_gaps(*pair.take(lambda recording: recording.gaps))],
    ),
    Section(
        name="collectives",
        is_known=_is_traced,
        compare=lambda pair: compare_traffic(*pair.calls, pair.common),
        total=lambda pair: total_traffic(*pair.calls),
        has_ranks=True,
    ),
    Section(
        name="memory",
        is_known=lambda recording: bool(recording.memory),
        compare=lambda pair: compare_memory(
            *pair.take(lambda recording: recording.memory), pair.common, pair.names
        ),
        total=lambda pair: [total_memory(*pair.take(lambda recording: recording.memory))],
        has_ranks=True,
    ),
    Section(
        name="modules",
        is_known=lambda recording: bool(recording.modules),
        compare=lambda pair: compare_holdings(*pair.holdings),
        total=lambda pair: [total_holdings(*pair.holdings)],
    ),
    Section(
        name="explanations",
        is_known=lambda recording: bool(recording.explanations),
        compare=lambda pair: compare_explanations(
            *pair.take(lambda recording: recording.explanations)
        ),
        total=lambda pair: [
            total_explanations(*pair.take(lambda recording: recording.explanations))
        ],
    ),
    Section(
        name="coverage",
        is_known=lambda recording: bool(recording.coverage),
        compare=lambda pair: compare_coverage(
            *pair.take(lambda recording: recording.coverage), pair.names
        ),
        total=lambda pair: [total_coverage(*pair.take(lambda recording: recording.coverage))],
    ),
    Section(
        name="parity",
        is_known=lambda recording: bool(recording.parity or recording.parallel),
        compare=lambda pair: compare_parity(*pair.both, pair.names),
        total=lambda pair: [total_parity(*pair.both)],
    ),
    Section(
        name="parallel programs",
        is_known=lambda recording: bool(recording.parallel),
        compare=lambda pair: compare_programs(
            *pair.take(lambda recording: recording.parallel), pair.names
        ),
        total=lambda pair: [total_programs(*pair.take(lambda recording: recording.parallel))],
    ),
    Section(
        name="diagnoses",
        is_known=lambda recording: bool(recording.diagnoses),
        compare=lambda pair: compare_diagnoses(*pair.take(lambda recording: recording.diagnoses)),
        total=lambda pair: [total_diagnoses(*pair.take(lambda recording: recording.diagnoses))],
    ),
)


_BY_SIZE = (Area.COLLECTIVES, Area.BYTES, Area.MEMORY)  # the largest change first
_ORDER = {area: index for index, area in enumerate(Area)}


def compare(
    before: Recording,
    after: Recording,
    *,
    titles: tuple[str, str] = ("before", "after"),
    is_folded: bool = True,
) -> Changes:
    """Compare two recordings; with `is_folded`, identical layers share a row."""
    pair = Pair(before, after)
    sections = [
        section for section in SECTIONS if section.is_known(before) and section.is_known(after)
    ]
    changes = [change for section in sections for change in section.compare(pair)]
    totals = chain.from_iterable(section.total(pair) for section in sections)
    return Changes(
        before=titles[0],
        after=titles[1],
        totals=tuple(sorted(totals, key=lambda total: _ORDER[total.area])),
        rows=_sort(fold_changes(changes) if is_folded else changes),
        notes=tuple(_list_notes(pair)),
        modules=pair.modules,
    )


def _sort(changes: Iterable[Change]) -> tuple[Change, ...]:
    def sort_key(change: Change) -> tuple[float, ...]:
        if change.area is Area.FINDINGS:  # those for the worse first
            return _ORDER[change.area], not change.is_worse
        is_part = change.path is not None
        size = abs(change.delta) * change.repeat if is_part and change.area in _BY_SIZE else 0
        return _ORDER[change.area], is_part, -size

    return tuple(sorted(changes, key=sort_key))


def _list_notes(pair: Pair) -> Iterator[str]:
    known = [[section.is_known(side) for section in SECTIONS] for side in pair.both]
    if any(
        section.has_ranks and all(sides) for section, *sides in zip(SECTIONS, *known, strict=True)
    ):
        yield from filter(None, [pair.note_ranks()])
    checks = [
        (*recording.run.instruments, *(f"no {check}" for check in recording.run.skipped_checks))
        for recording in pair.both
    ]
    if set(checks[0]) != set(checks[1]):
        named = "; ".join(", ".join(names) or "not recorded" for names in checks)
        yield f"findings come from different checks ({named})"
    passes = [recording.run.num_forwards for recording in pair.both if recording.collectives]
    if len(set(passes)) > 1:
        words = " and ".join(
            "not counted" if num_passes is None else f"{num_passes:,}" for num_passes in passes
        )
        yield f"collectives are of different numbers of forward passes ({words})"
    for index, word in enumerate(("first", "second")):
        alone = [
            section.name
            for position, section in enumerate(SECTIONS)
            if known[index][position] and not known[1 - index][position]
        ]
        if alone:
            yield f"only the {word} recording has {_list_words(alone)}: not compared"
        if any(gap.is_loss for gap in pair.both[index].gaps):
            yield f"records of the {word} recording were lost: differences may come from that"


def _list_words(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
