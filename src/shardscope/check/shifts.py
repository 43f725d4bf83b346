"""Ranks that skip collectives and go on: their later ones are taken for those that they skipped.

Nothing differs at first where the steps of a program are alike. But the rank has issued fewer
collectives than before from one pass of a decision to the next, and the others have not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from shardscope.launch.decisions import Change, Decisions, Pass, Site
from shardscope.record import Collective, Recording


@final
@dataclass(frozen=True)
class Shift:
    """How many collectives `ranks` have issued more (fewer, if negative) than the others.

    `call` is the first that they have skipped, as another rank has issued it, or their first extra.
    """

    ranks: tuple[int, ...]
    num_calls: int
    call: Collective | None


def find_shift(
    before: Mapping[int, Decisions],
    after: Mapping[int, Decisions],
    recording: Recording | None,
    change: Change,
) -> Shift | None:
    """Whether ranks have issued more or fewer collectives after a change; others as many as before.

    `before` and `after` are the decisions of the run without changes and of that with them.
    """
    rank = change.ranks[-1]
    own = _count_calls(before, after, rank, change)
    if own is None:
        return None
    others = [peer for peer in after if peer not in change.ranks]
    expected = [count for peer in others if (count := _count_calls(before, after, peer, change))]
    shift = own.difference - (expected[0].difference if expected else 0)
    if not shift or not others:
        return None
    peer, start = (others[0], expected[0].start) if shift < 0 and expected else (rank, own.start)
    calls = [] if recording is None else [c for c in recording.collectives if c.rank == peer]
    call = next((c for c in calls if c.order == start), None)
    return Shift(change.ranks, shift, call)


@final
@dataclass(frozen=True)
class _Count:
    """How many collectives a rank has issued more than before, from a pass to the next."""

    difference: int
    start: int  # how many it had issued at the pass


def _count_calls(
    before: Mapping[int, Decisions], after: Mapping[int, Decisions], rank: int, change: Change
) -> _Count | None:
    known, now = (_list_passes(decisions.get(rank), change.site) for decisions in (before, after))
    following = change.number + 1
    if following >= min(len(known), len(now)):
        return None
    gaps = [
        passes[following].num_calls - passes[change.number].num_calls for passes in (now, known)
    ]
    return _Count(gaps[0] - gaps[1], now[change.number].num_calls)


def _list_passes(decisions: Decisions | None, site: Site) -> Sequence[Pass]:
    if decisions is None:
        return ()
    return [passed for passed in decisions.passes if decisions.sites[passed.site] == site]
