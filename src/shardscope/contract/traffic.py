"""Collectives added up per rank, module and what a limit may ask for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

from shardscope.contract.limits import COMM_FIGURES, CauseKind, Figure, Selector
from shardscope.contract.names import Names, ancestors
from shardscope.contract.said import (
    Said,
    classify_cause,
    has_trace,
    list_said,
    list_silent,
    ranks_of,
)
from shardscope.record import CollectiveKind, Phase, RankSpan, Recording

__all__ = ["Facet", "Reading", "Traffic", "facet_of", "matches", "read_traffic"]

Tally = tuple[int, int, int, int]  # count, and bytes put in, sent and got out, as COMM_FIGURES
_NOTHING: Tally = (0, 0, 0, 0)


class Facet(NamedTuple):
    """What a limit may ask for besides a module."""

    phase: Phase
    axis: str
    kind: CollectiveKind
    causes: tuple[CauseKind, ...]


class Reading(NamedTuple):
    """What a figure is in one module (in all, where it is None) on some ranks that are alike."""

    module: str | None
    ranks: tuple[int, ...]
    value: int


# Sums of ranks that are alike, by module; None is everything.
_Sums = dict[str | None, Tally]
# What modules said themselves.
_Own = dict[Facet, dict[str | None, Tally]]


@final
class Traffic:
    """What was said in a recording; ranks that said the same are one."""

    def __init__(self, recording: Recording, said: Sequence[Said]) -> None:
        self.recording = recording
        self._by_rank: dict[int, list[Said]] = {rank: [] for rank in ranks_of(recording)}
        for one in said:
            self._by_rank.setdefault(one.rank, []).append(one)
        self._classes = list(_fold_ranks(self._by_rank))
        owners = dict.fromkeys(owner for owner, _ in self.owned() if owner is not None)
        self.names = Names(recording, [*owners, *list_silent(recording)])
        self.axes = _list_axes(recording, said)
        self._sums: dict[Selector, list[_Sums]] = {}
        self._within: dict[int, dict[str | None, list[Said]]] = {}  # of ranks that were asked for
        self._holders: dict[str, list[RankSpan]] = defaultdict(list)
        for module in recording.modules:
            self._holders[module.name].extend(module.ranks)

    @property
    def is_traced(self) -> bool:
        """Whether all is known of each collective; of a program that was cut less is."""
        return has_trace(self.recording)

    @property
    def is_lossy(self) -> bool:
        """Whether there was more than this."""
        return any(gap.is_loss for gap in self.recording.gaps)

    def owned(self) -> Iterator[tuple[str | None, Facet]]:
        """Modules and what they themselves said, each once."""
        yield from dict.fromkeys(
            (owner, facet)
            for _, own in self._classes
            for facet, tallies in own.items()
            for owner in tallies
        )

    def has_what(self, selector: Selector) -> bool:
        """Whether there is such a module, and such an axis."""
        has_module = selector.module is None or bool(self.names.fit(selector.module))
        return has_module and all(axis in self.axes for axis in selector.axes)

    def read(self, selector: Selector, figure: Figure) -> list[Reading]:
        """The figure for each module that fits, on each rank that has it."""
        place = COMM_FIGURES.index(figure)
        modules = (None,) if selector.module is None else self.names.fit(selector.module)
        wanted, everything = self._sum_up(selector._replace(module=None)), self._sum_up(Selector())
        return [
            Reading(module, ranks, sums.get(module, _NOTHING)[place])
            for module in modules
            for (ranks, _), sums, others in zip(self._classes, wanted, everything, strict=True)
            if module is None or module in others or self._is_held(module, ranks)
        ]

    def list_said(self, reading: Reading, selector: Selector) -> list[Said]:
        """What one of the ranks said that counts."""
        rank = reading.ranks[0]
        if rank not in self._within:
            self._within[rank] = _sort_by_module(self._by_rank[rank])
        said = self._within[rank].get(reading.module, ())
        return [one for one in said if matches(selector, facet_of(one))]

    def _sum_up(self, selector: Selector) -> list[_Sums]:
        if selector not in self._sums:
            self._sums[selector] = [_add_up(own, selector) for _, own in self._classes]
        return self._sums[selector]

    def _is_held(self, module: str, ranks: tuple[int, ...]) -> bool:
        """Whether one of the ranks has it; stages of a pipeline do not have each other's."""
        if not self.is_traced:
            return True
        spans = [
            range(span.first, span.first + span.count * span.step, span.step)
            for span in self._holders.get(module, ())
        ]
        return any(rank in span for span in spans for rank in ranks)


def read_traffic(recording: Recording) -> Traffic | None:
    """What was said, or None if nobody looked."""
    said = list_said(recording)
    return None if said is None else Traffic(recording, said)


def matches(selector: Selector, facet: Facet) -> bool:
    """Whether it is one of those asked for, whatever its module."""
    return (
        (not selector.phases or facet.phase in selector.phases)
        and (not selector.axes or facet.axis in selector.axes)
        and (not selector.kinds or facet.kind in selector.kinds)
        and (not selector.causes or any(one in selector.causes for one in facet.causes))
    )


def facet_of(one: Said) -> Facet:
    """What it is, whatever its module."""
    return Facet(one.phase, one.axis, one.kind, classify_cause(one.cause))


def _sort_by_module(said: Sequence[Said]) -> dict[str | None, list[Said]]:
    """By each module that it counts for: its own, those that hold that, and None for all."""
    within: dict[str | None, list[Said]] = defaultdict(list)
    for one in said:
        for module in _modules_of(one.module):
            within[module].append(one)
    return within


def _modules_of(owner: str | None) -> tuple[str | None, ...]:
    return (None,) if owner is None else (None, *ancestors(owner))


def _fold_ranks(by_rank: dict[int, list[Said]]) -> Iterator[tuple[tuple[int, ...], _Own]]:
    alike: dict[frozenset[object], tuple[list[int], _Own]] = {}
    for rank, said in sorted(by_rank.items()):
        own: _Own = defaultdict(dict)
        for one in said:
            put_in, got_out, sent = one.sizes
            tallies = own[facet_of(one)]
            before = tallies.get(one.module, _NOTHING)
            tallies[one.module] = _plus(before, (1, put_in, sent, got_out))
        likeness = frozenset((facet, *item) for facet, some in own.items() for item in some.items())
        alike.setdefault(likeness, ([], own))[0].append(rank)
    for ranks, own in alike.values():
        yield tuple(ranks), own


def _add_up(own: _Own, selector: Selector) -> _Sums:
    sums: _Sums = {}
    for facet, tallies in own.items():
        if not matches(selector, facet):
            continue
        for owner, tally in tallies.items():
            for module in _modules_of(owner):
                sums[module] = _plus(sums.get(module, _NOTHING), tally)
    return sums


def _plus(one: Tally, other: Tally) -> Tally:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3]


def _list_axes(recording: Recording, said: Sequence[Said]) -> tuple[str, ...]:
    named = [axis.name for axis in recording.run.axes]
    named += [axis.name for program in recording.parallel for axis in program.axes]
    named += [group.axis for group in recording.groups if group.axis is not None]
    return tuple(dict.fromkeys([*named, *(one.axis for one in said)]))
