"""Collectives summed up, and ranks that did the same folded into one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from msgspec import Struct

from shardscope.record import (
    Collective,
    CollectiveKind,
    Phase,
    RankSpan,
    Recording,
    compress_ranks,
    expand_ranks,
    name_axis,
)

__all__ = ["Facet", "RankClass", "Tally", "add_up", "fold_ranks", "name_axis", "tally"]


class Facet(Struct, frozen=True, order=True):
    """What sets one pile of collectives apart from another."""

    phase: Phase
    kind: CollectiveKind
    axis: str


class Tally(Struct, frozen=True):
    """How much was said."""

    count: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    wire_bytes: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.count + other.count,
            self.input_bytes + other.input_bytes,
            self.output_bytes + other.output_bytes,
            self.wire_bytes + other.wire_bytes,
        )

    def __mul__(self, times: int) -> Tally:
        return Tally(
            self.count * times,
            self.input_bytes * times,
            self.output_bytes * times,
            self.wire_bytes * times,
        )


class RankClass(Struct, frozen=True):
    """Ranks that issued the same collectives, and those of one of them."""

    ranks: tuple[RankSpan, ...]
    calls: tuple[Collective, ...]


def add_up(tallies: Iterable[Tally]) -> Tally:
    """The sum."""
    return sum(tallies, Tally())


def tally(call: Collective) -> Tally:
    """One collective."""
    return Tally(1, call.input_bytes, call.output_bytes, call.wire_bytes)


def fold_ranks(recording: Recording) -> tuple[RankClass, ...]:
    """Sort ranks by what they issued; a run whose ranks are all alike has one class."""
    calls: dict[int, list[Collective]] = {rank: [] for rank in expand_ranks(recording.run.ranks)}
    for call in recording.collectives:
        calls.setdefault(call.rank, []).append(call)
    alike: dict[frozenset[tuple[object, int]], list[int]] = defaultdict(list)
    for rank in sorted(calls):
        alike[frozenset(Counter(map(_profile, calls[rank])).items())].append(rank)
    return tuple(
        RankClass(compress_ranks(ranks), tuple(calls[ranks[0]])) for ranks in alike.values()
    )


def _profile(call: Collective) -> object:
    size = (call.num_ranks, call.input_bytes, call.output_bytes, call.wire_bytes)
    return (call.owner, call.phase, call.kind, call.axis, call.cause, size)
