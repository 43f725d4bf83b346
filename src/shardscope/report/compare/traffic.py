"""Collectives of two recordings: how many, how much, and why, by module, kind, axis and phase."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import final

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
from shardscope.report.compare.brief import INPUT, WIRE
from shardscope.report.compare.changes import NO_MODULE, Area, AreaTotal, Change, Unit
from shardscope.report.compare.facts import Fact, match_facts
from shardscope.report.compare.names import CleanNames
from shardscope.report.compare.rank_pairs import join_ranks
from shardscope.report.traffic import RankClass, add_up, fold_ranks, name_axis, tally
from shardscope.report.units import format_bytes

__all__ = ["CallTable", "compare_traffic", "total_traffic"]

_MAX_CAUSES = 3  # that are named of one pile
_AREAS = (Area.COLLECTIVES, Area.BYTES, Area.CAUSES)


@final
class _Pile:
    """Collectives of one module that are of one kind, along one axis, in one phase."""

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
    """What one recording's ranks said; ranks that said the same share a class."""

    def __init__(self, recording: Recording, names: CleanNames) -> None:
        self._names = names
        self._world_size = recording.run.world_size
        self.classes = fold_ranks(recording) or (RankClass((), ()),)
        self._class_of = {
            rank: index
            for index, one in enumerate(self.classes)
            for rank in expand_ranks(one.ranks)
        }
        self._facts: dict[int, dict[Area, list[Fact]]] = {}

    def class_of(self, rank: int) -> int:
        """The position of a rank's class."""
        return self._class_of[rank]

    def busiest(self) -> int:
        """The position of the class that sent most."""
        sums = [add_up(map(tally, one.calls)) for one in self.classes]
        return max(range(len(sums)), key=lambda index: (sums[index].wire_bytes, sums[index].count))

    def facts(self, index: int, area: Area) -> list[Fact]:
        """What is to be compared of one class."""
        if index not in self._facts:
            piles = self._pile_up(self.classes[index].calls)
            self._facts[index] = {
                Area.COLLECTIVES: [_count_fact(*item) for item in piles.items()],
                Area.BYTES: [fact for item in piles.items() for fact in _byte_facts(*item)],
                Area.CAUSES: [_cause_fact(*item) for item in piles.items()],
            }
        return self._facts[index][area]

    def _pile_up(self, calls: Sequence[Collective]) -> dict[_Key, _Pile]:
        piles: dict[_Key, _Pile] = defaultdict(_Pile)
        for call in calls:
            owner = NO_MODULE if call.owner is None else self._names.clean(call.owner)
            piles[owner, call.phase, call.kind, name_axis(call, self._world_size)].add(call)
        return piles


def compare_traffic(
    before: CallTable, after: CallTable, common: tuple[int, ...]
) -> Iterator[Change]:
    """Rank by rank where both recordings have the same ranks, else the busiest of each."""
    pairs: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in common:
        pairs[before.class_of(rank), after.class_of(rank)].append(rank)
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
        # What was added or is gone has a row already, which says why.
        if area is not Area.CAUSES or (change.before is not None and change.after is not None):
            yield change


def total_traffic(before: CallTable, after: CallTable) -> Iterator[AreaTotal]:
    """Figures of the busiest rank of each."""
    sums = [add_up(map(tally, one.classes[one.busiest()].calls)) for one in (before, after)]
    counts = [f"{one.count:,}" for one in sums]
    wires = [format_bytes(one.wire_bytes) for one in sums]
    causes = [f"{_count_causes(one):,}" for one in (before, after)]
    for area, (first, second) in zip(_AREAS, (counts, wires, causes), strict=True):
        yield AreaTotal(area=area, before=first, after=second)


def _count_causes(table: CallTable) -> int:
    return len({_say(call.cause) for call in table.classes[table.busiest()].calls})


def _name(key: _Key) -> str:
    _, phase, kind, axis = key
    return f"{kind}[{axis}] " + ("outside" if phase is Phase.OUTSIDE else f"in {phase}")


def _count_fact(key: _Key, pile: _Pile) -> Fact:
    return Fact(
        module=key[0],
        what=_name(key),
        value=pile.count,
        badness=pile.count,
        because=_explain(pile),
    )


def _byte_facts(key: _Key, pile: _Pile) -> Iterator[Fact]:
    sizes = {WIRE: pile.wire_bytes, INPUT: pile.input_bytes}
    for words, size in sizes.items():
        if size:
            what = f"{_name(key)}{words}"
            yield Fact(module=key[0], what=what, value=size, unit=Unit.BYTES, badness=size)


def _cause_fact(key: _Key, pile: _Pile) -> Fact:
    num_unasked = sum(
        count
        for cause, count in pile.causes.items()
        if isinstance(cause, Redistribute) and cause.is_implicit
    )
    return Fact(
        module=key[0],
        what=_name(key),
        value=_describe_causes(pile),
        unit=Unit.WORDS,
        badness=num_unasked,
        because=_locate(pile.source),
    )


def _describe_causes(pile: _Pile) -> str:
    ranked = _rank_causes(pile)
    if len(ranked) == 1:
        return ranked[0][0]
    return ", ".join(f"{count}× {words}" for words, count in ranked)


def _rank_causes(pile: _Pile) -> list[tuple[str, int]]:
    """In words, the commonest first."""
    counts: Counter[str] = Counter()
    for cause, count in pile.causes.items():
        counts[_say(cause)] += count
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _say(cause: Cause | None) -> str:
    # Numbers of compiled graphs change with whatever was compiled before.
    return "compiled graph" if isinstance(cause, Compiled) else describe_cause(cause)


def _explain(pile: _Pile) -> str:
    """The commonest causes, and a line."""
    words = "; ".join(words for words, _ in _rank_causes(pile)[:_MAX_CAUSES])
    return f"{words} ({_locate(pile.source)})" if pile.source else words


def _locate(source: Source | None) -> str:
    return "" if source is None else f"{source.file}:{source.line}"
