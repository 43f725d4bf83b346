"""Ranks that skip collectives and go on: their later ones are taken for those that they skipped.

Nothing differs at first where the steps of a program are alike. But the rank has issued fewer
collectives than before from one pass of a decision to the next, and the others have not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from shardscope.launch.decisions import Change, Decisions, Pass, Site, SiteKind
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
    """Compare the collectives that a rank issues from the change to the next mark of the program.

    A mark is a pass of a site that the program comes to once in a step: its data loader, or the
    site of the change itself.
    """
    if rank not in before or rank not in after:
        return None
    known, now = (_find_span(decisions[rank], change) for decisions in (before, after))
    if known is None or now is None:
        return None
    return _Count((now[1] - now[0]) - (known[1] - known[0]), now[0])


def _find_span(decisions: Decisions, change: Change) -> tuple[int, int] | None:
    """How many collectives a rank had issued at the change, and at the next mark after it."""
    places = [index for index, p in enumerate(decisions.passes) if _is_at(decisions, p, change)]
    if change.number >= len(places):
        return None
    start = places[change.number]
    mark = _find_mark(decisions, change.site)
    following = (
        passed.num_calls for passed in decisions.passes[start + 1 :] if passed.site == mark
    )
    end = next(following, None)
    return None if end is None else (decisions.passes[start].num_calls, end)


def _is_at(decisions: Decisions, passed: Pass, change: Change) -> bool:
    return decisions.sites[passed.site] == change.site


def _find_mark(decisions: Decisions, site: Site) -> int | None:
    """The site that marks steps: that of the change, if it takes batches, or the data loader."""
    if site.kind in (SiteKind.BATCH, SiteKind.INPUT):
        return decisions.sites.index(site)
    counts = Counter(passed.site for passed in decisions.passes)
    loaders = [
        (counts[index], index)
        for index, known in enumerate(decisions.sites)
        if known.kind is SiteKind.BATCH
    ]
    if loaders:
        return max(loaders)[1]
    iterations = [p.iteration for p in decisions.passes if decisions.sites[p.site] == site]
    is_single = len(set(iterations)) == len(iterations)
    return decisions.sites.index(site) if is_single else None
