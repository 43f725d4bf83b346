"""Compares collectives: count, bytes and causes, by module, kind, axis and phase."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, final

from shardscope.record import (
    Cause,
    Collective,
    CollectiveKind,
    Compiled,
    Phase,
    Recording,
    Redistribute,
    Source,
    describe_cause,
    expand_ranks,
)
from shardscope.record.base import name_line
from shardscope.record.recording import name_axis
from shardscope.record.traffic import (
    count_traffic,
    sum_traffic,
)
from shardscope.record.units import format_bytes
from shardscope.report.compare.changes import INPUT, NO_MODULE, WIRE, Area, AreaTotal, Change, Unit
from shardscope.report.compare.facts import CleanNames, Fact, match_facts
from shardscope.report.compare.memory_changes import join_ranks
from shardscope.report.model.traffic_totals import (
    IdenticalRanks,
    find_busiest_ranks,
    fold_ranks,
)

_MAX_CAUSES = 3  # causes named per row
_AREAS = (Area.COLLECTIVES, Area.BYTES, Area.CAUSES)


@final
class _CallTotals:
    """Totals of the collectives of one module with the same kind, axis and phase."""

    def __init__(self) -> None:
        self.count = 0
        self.input_bytes = 0
        self.wire_bytes = 0
        self.causes: Counter[Cause | None] = Counter()
        self.source: Source | None = None

    def add(self, call: Collective) -> None:
        self.count += 1
        self.input_bytes += call.input_bytes
        self.wire_bytes += call.wire_bytes
        self.causes[call.cause] += 1
        if self.source is None:
            self.source = call.source


# Module, phase, kind and axis.
_Key = tuple[str, Phase, CollectiveKind, str]


@final
class CallTable:
    """The collectives of one recording, by sets of identical ranks."""

    def __init__(self, recording: Recording, names: CleanNames) -> None:
        self._names = names
        self._world_size = recording.run.world_size
        self.rank_sets = fold_ranks(recording) or (IdenticalRanks((), ()),)
        self._rank_set_of = {
            rank: index
            for index, rank_set in enumerate(self.rank_sets)
            for rank in expand_ranks(rank_set.ranks)
        }
        self._facts: dict[int, dict[Area, list[Fact]]] = {}

    def find_rank_set(self, rank: int) -> int:
        """Return the position of a rank's set."""
        return self._rank_set_of[rank]

    def busiest(self) -> int:
        """Return the position of the set that sent most bytes."""
        return find_busiest_ranks(self.rank_sets)

    def facts(self, index: int, area: Area) -> list[Fact]:
        """List what is compared of one set of ranks."""
        if index not in self._facts:
            totals_by_key = self._total_calls(self.rank_sets[index].calls)
            self._facts[index] = {
                Area.COLLECTIVES: [_count_fact(*item) for item in totals_by_key.items()],
                Area.BYTES: [fact for item in totals_by_key.items() for fact in _byte_facts(*item)],
                Area.CAUSES: [_cause_fact(*item) for item in totals_by_key.items()],
            }
        return self._facts[index][area]

    def _total_calls(self, calls: Sequence[Collective]) -> dict[_Key, _CallTotals]:
        totals_by_key: dict[_Key, _CallTotals] = defaultdict(_CallTotals)
        for call in calls:
            owner = NO_MODULE if call.owner is None else self._names.clean(call.owner)
            totals_by_key[owner, call.phase, call.kind, name_axis(call, self._world_size)].add(call)
        return totals_by_key


def compare_traffic(
    before: CallTable, after: CallTable, common: tuple[int, ...]
) -> Iterator[Change]:
    """Compare rank by rank if both recordings have the same ranks, else their busiest ranks."""
    pairs: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in common:
        pairs[before.find_rank_set(rank), after.find_rank_set(rank)].append(rank)
    if not common:
        pairs[before.busiest(), after.busiest()] = [0]
    for area in _AREAS:
        yield from join_ranks(
            {
                tuple(ranks): list(
                    _match(area, before.facts(first, area), after.facts(second, area))
                )
                for (first, second), ranks in pairs.items()
            }
        )


def _match(area: Area, before: list[Fact], after: list[Fact]) -> Iterator[Change]:
    for change in match_facts(area, before, after):
        # Added and removed collectives have a row already, with their cause.
        if area is not Area.CAUSES or (change.before is not None and change.after is not None):
            yield change


def total_traffic(before: CallTable, after: CallTable) -> Iterator[AreaTotal]:
    """Format the totals of each recording's busiest rank."""
    sums = [
        sum_traffic(map(count_traffic, table.rank_sets[table.busiest()].calls))
        for table in (before, after)
    ]
    counts = [f"{totals.count:,}" for totals in sums]
    wires = [format_bytes(totals.wire_bytes) for totals in sums]
    causes = [f"{_count_causes(table):,}" for table in (before, after)]
    for area, (first, second) in zip(_AREAS, (counts, wires, causes), strict=True):
        yield AreaTotal(area=area, before=first, after=second)


def _count_causes(table: CallTable) -> int:
    return len({_format_cause(call.cause) for call in table.rank_sets[table.busiest()].calls})


def _name(key: _Key) -> str:
    _, phase, kind, axis = key
    return f"{kind}[{axis}] " + ("outside" if phase is Phase.OUTSIDE else f"in {phase}")


def _name_facets(key: _Key) -> dict[str, Any]:
    _, phase, kind, axis = key
    return {"axis": axis, "kind": str(kind), "phase": str(phase)}


def _count_fact(key: _Key, totals: _CallTotals) -> Fact:
    return Fact(
        module=key[0],
        what=_name(key),
        value=totals.count,
        badness=totals.count,
        because=_explain(totals),
        source=totals.source,
        **_name_facets(key),
    )


def _byte_facts(key: _Key, totals: _CallTotals) -> Iterator[Fact]:
    sizes = {WIRE: totals.wire_bytes, INPUT: totals.input_bytes}
    for words, size in sizes.items():
        if size:
            label = f"{_name(key)}{words}"
            yield Fact(
                module=key[0],
                what=label,
                value=size,
                unit=Unit.BYTES,
                badness=size,
                source=totals.source,
                **_name_facets(key),
            )


def _cause_fact(key: _Key, totals: _CallTotals) -> Fact:
    num_unasked = sum(
        count
        for cause, count in totals.causes.items()
        if isinstance(cause, Redistribute) and cause.is_implicit
    )
    return Fact(
        module=key[0],
        what=_name(key),
        value=_describe_causes(totals),
        unit=Unit.WORDS,
        badness=num_unasked,
        because=name_line(totals.source),
        source=totals.source,
        **_name_facets(key),
    )


def _describe_causes(totals: _CallTotals) -> str:
    ranked = _rank_causes(totals)
    if len(ranked) == 1:
        return ranked[0][0]
    return ", ".join(f"{count}× {words}" for words, count in ranked)


def _rank_causes(totals: _CallTotals) -> list[tuple[str, int]]:
    """Describe the causes, most frequent first."""
    counts: Counter[str] = Counter()
    for cause, count in totals.causes.items():
        counts[_format_cause(cause)] += count
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _format_cause(cause: Cause | None) -> str:
    # The number of a compiled graph depends on earlier compilations, so it is left out.
    return "compiled graph" if isinstance(cause, Compiled) else describe_cause(cause)


def _explain(totals: _CallTotals) -> str:
    """Name the most frequent causes, and a source line."""
    words = "; ".join(words for words, _ in _rank_causes(totals)[:_MAX_CAUSES])
    return f"{words} ({name_line(totals.source)})" if totals.source else words
