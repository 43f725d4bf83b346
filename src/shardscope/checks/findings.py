"""Findings about ranks that do not issue the same collectives: the condition and the remedy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from msgspec.structs import replace

from shardscope.checks.exchanges import ExchangeMismatch, find_exchange_mismatch
from shardscope.checks.group_order import find_waiting
from shardscope.checks.remedies import suggest_remedy
from shardscope.checks.runs import RanksRun
from shardscope.checks.shifts import Shift
from shardscope.checks.variations import PlannedVariation
from shardscope.hang import (
    P2P_KINDS,
    Divergence,
    describe_call,
    find_divergences,
    match_ranks,
    name_ranks,
    payload_bytes,
    sort_by_group,
)
from shardscope.launch.calls import NEW_GROUP
from shardscope.launch.decisions import Decisions
from shardscope.record import (
    Collective,
    Finding,
    Recording,
    Severity,
    compress_ranks,
    intersect_ranks,
)

DIVERGENCE = "divergence"
POSSIBLE_DIVERGENCE = "possible-divergence"
_MAX_SIDES = 4


@final
@dataclass(frozen=True)
class Side:
    """Ranks that are at the same place: in a call, or, if it is None, at their end."""

    ranks: tuple[int, ...]
    call: Collective | None
    position: int | None = None  # among the collectives of the call's group


def explain_divergence(run: RanksRun, variation: PlannedVariation | None) -> Finding | None:
    """The finding about ranks that have diverged, under the variation that came before it.

    None if no rank waits: all have ended.
    """
    recording = run.recording
    assert recording is not None
    divergence = _find_divergence(recording)
    mismatch = find_exchange_mismatch(recording, run.decisions)
    if divergence is not None:
        sides = _list_sides(recording, divergence.group, divergence.position)
        fact = _describe_divergence(divergence, sides)
        subject = f"group {divergence.group}"
    elif mismatch is not None:
        sides = _list_exchange_sides(mismatch)
        fact, subject = _describe_mismatch(mismatch), f"group {mismatch.group}"
    elif recording.run.is_simulated and not find_waiting(recording, run.decisions):
        return _explain_transfers(recording, variation)
    else:
        sides = _list_last_calls(recording, find_waiting(recording, run.decisions))
        fact = "ranks wait for each other: " + "; ".join(map(_describe_waiters, sides[:_MAX_SIDES]))
        subject = name_ranks(rank for side in sides for rank in side.ranks)
    if not any(side.call for side in sides):
        return None
    is_early = _have_left_early(sides, run.decisions)
    return _make_finding(sides, fact, subject, variation, is_early=is_early)


def _find_divergence(recording: Recording) -> Divergence | None:
    """The first position of a group at which ranks disagree."""
    return next(iter(find_divergences(sort_by_group(recording)).values()), None)


def _describe_divergence(divergence: Divergence, sides: Sequence[Side]) -> str:
    issued = ", and ".join(map(_describe_issuers, sides[:_MAX_SIDES]))
    return f"at position {divergence.position} of group {divergence.group}, {issued}"


def _explain_transfers(recording: Recording, variation: PlannedVariation | None) -> Finding | None:
    """The finding about sends and receives that do not match, or that wait for each other."""
    found = next(iter(match_ranks(recording)), None)
    if found is None:
        return None
    return replace(
        found,
        rule=DIVERGENCE if variation is None else POSSIBLE_DIVERGENCE,
        severity=Severity.ERROR if variation is None else Severity.WARNING,
        fact=found.fact if variation is None else f"if {variation.condition}: {found.fact}",
        source=found.source if variation is None else variation.source or found.source,
    )


def _list_exchange_sides(mismatch: ExchangeMismatch) -> list[Side]:
    calls = mismatch.receiver_call, mismatch.sender_call
    return [Side((call.rank,), call, mismatch.position) for call in calls]


def _describe_mismatch(mismatch: ExchangeMismatch) -> str:
    excess = mismatch.excess
    return (
        f"at position {mismatch.position} of group {mismatch.group}, rank {excess.sender} sends "
        f"{excess.num_sent:,} bytes to rank {excess.receiver} in "
        f"{_describe(mismatch.sender_call)}, and rank {excess.receiver} expects "
        f"{excess.num_expected:,} bytes in {_describe(mismatch.receiver_call)}"
    )


def differ_in_size_only(run: RanksRun, before: RanksRun) -> bool:
    """Whether the ranks of a group issue the same collectives, on tensors of a new size.

    `before` is the run without changes: if a size is found there, the ranks issue what they did, in
    another order.
    """
    recording = run.recording
    if recording is None or before.recording is None:
        return False
    divergence = _find_divergence(recording)
    if divergence is None:
        return find_exchange_mismatch(recording, run.decisions) is not None
    sides = _list_sides(recording, divergence.group, divergence.position)
    calls = [side.call for side in sides if side.call is not None]
    if len(calls) < len(sides) or len({(call.kind, call.source) for call in calls}) > 1:
        return False
    known = {(call.kind, call.source, payload_bytes(call)) for call in before.recording.collectives}
    return any((call.kind, call.source, payload_bytes(call)) not in known for call in calls)


def explain_shift(shift: Shift, run: RanksRun, variation: PlannedVariation) -> Finding:
    """The finding about ranks that skip collectives, or issue more, and go on.

    `run` has no other change than that of `variation`.
    """
    ranks, count = name_ranks(shift.ranks), abs(shift.num_calls)
    is_single = len(shift.ranks) == 1
    number = "a collective" if count == 1 else f"{count:,} collectives"
    if shift.num_calls < 0:
        words = f"{'skips' if is_single else 'skip'} {number} that the other ranks issue"
    else:
        words = f"{'issues' if is_single else 'issue'} {number} more than the other ranks"
    first = "" if shift.call is None else f", the first {_describe(shift.call)}"
    fact = (
        f"{ranks} {words}{first}; what {'it issues' if is_single else 'they issue'} later is taken "
        "for these, and in the end ranks wait forever"
    )
    divergence = None if run.recording is None else _find_divergence(run.recording)
    if divergence is not None and run.recording is not None:
        last = _list_sides(run.recording, divergence.group, divergence.position)
        fact += f": {_describe_divergence(divergence, last)}"
    sides = [Side(shift.ranks, None), Side((), shift.call)]
    return _make_finding(sides, fact, ranks, variation)


def _make_finding(
    sides: Sequence[Side],
    fact: str,
    subject: str,
    variation: PlannedVariation | None,
    *,
    is_early: bool = False,
) -> Finding:
    first = sides[0]
    source = next((side.call.source for side in sides if side.call and side.call.source), None)
    calls = [side.call for side in sides if side.call is not None]
    has_ended = any(side.call is None for side in sides)
    remedy = suggest_remedy(calls, variation, has_ended=has_ended, is_early=is_early)
    if variation is None:
        return Finding(
            rule=DIVERGENCE,
            severity=Severity.ERROR,
            subject=subject,
            fact=fact,
            remedy=remedy,
            rank=first.ranks[0] if first.ranks else None,
            source=(first.call.source if first.call else None) or source,
        )
    return Finding(
        rule=POSSIBLE_DIVERGENCE,
        severity=Severity.WARNING,
        subject=subject,
        fact=f"if {variation.condition}: {fact}",
        remedy=remedy,
        rank=variation.ranks[0],
        source=variation.source or source,
    )


def _have_left_early(sides: Sequence[Side], decisions: Mapping[int, Decisions]) -> bool:
    """Whether the ranks that have ended have taken no more steps than those that wait."""
    steps: dict[bool, list[int]] = {True: [], False: []}
    for side in sides:
        known = [decisions[rank].num_steps for rank in side.ranks if rank in decisions]
        steps[side.call is None].extend(known)
    return bool(steps[True] and steps[False]) and max(steps[True]) <= max(steps[False])


def _list_sides(recording: Recording, group: str, position: int) -> list[Side]:
    """What each rank of a group issues at a position, ranks with the same together, few first."""
    ranks: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    calls: dict[tuple[object, ...], Collective | None] = {}
    members = _list_members(recording, group)
    for rank in members:
        own = [
            call
            for call in recording.collectives
            if call.rank == rank and call.group == group and call.kind not in P2P_KINDS
        ]
        own.sort(key=lambda call: call.group_order)
        call = own[position] if position < len(own) else None
        if call is None and any(stop.rank == rank for stop in recording.stops):
            continue  # it was ended before
        key = _place_of(call)
        ranks[key].append(rank)
        calls.setdefault(key, call)
    sides = [Side(tuple(ranks[key]), calls[key], position) for key in ranks]
    return sorted(sides, key=lambda side: len(side.ranks))


def _list_last_calls(recording: Recording, waiting: Mapping[int, Collective]) -> list[Side]:
    """The call that each rank waits in, ranks in the same call together, few first.

    `waiting` are the calls in which simulated ranks would wait; others wait in their last.
    """
    if recording.run.is_simulated:
        by_place: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
        for rank, call in sorted(waiting.items()):
            by_place[_place_of(call)].append(rank)
        found = [Side(tuple(ranks), waiting[ranks[0]]) for ranks in by_place.values()]
        return sorted(found, key=lambda side: len(side.ranks))
    last: dict[int, Collective] = {}
    counts: defaultdict[tuple[int, str], int] = defaultdict(int)
    for call in sorted(recording.collectives, key=lambda call: call.order):
        last[call.rank] = call
        counts[call.rank, call.group] += call.kind not in P2P_KINDS
    ranks: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    stopped = {stop.rank for stop in recording.stops}
    for rank in sorted(last):
        ranks[_place_of(last[rank] if rank in stopped else None)].append(rank)
    sides = []
    for key, members in ranks.items():
        waiting_call = last[members[0]] if key else None
        position = None
        if waiting_call is not None and waiting_call.kind not in P2P_KINDS:
            position = counts[members[0], waiting_call.group] - 1
        sides.append(Side(tuple(members), waiting_call, position))
    return sorted(sides, key=lambda side: len(side.ranks))


def _place_of(call: Collective | None) -> tuple[object, ...]:
    if call is None:
        return ()
    line = None if call.source is None else (call.source.file, call.source.line)
    size = payload_bytes(call)
    return (call.kind, call.group, call.dtype, call.reduce_op, size, call.owner, line)


def _list_members(recording: Recording, group: str) -> list[int]:
    members = {call.rank for call in recording.collectives if call.group == group}
    recorded = {call.rank for call in recording.collectives}
    for known in recording.groups:
        if known.name == group:
            members |= {*intersect_ranks(known.ranks, compress_ranks(recorded))}
    return sorted(members)


def _describe(call: Collective) -> str:
    if call.op != NEW_GROUP:
        return describe_call(call)
    place = "" if call.source is None else f" ({call.source.file}:{call.source.line})"
    return f"{call.group}{place}"


def _describe_issuers(side: Side) -> str:
    verb = "issues" if len(side.ranks) == 1 else "issue"
    what = "nothing more" if side.call is None else _describe(side.call)
    return f"{name_ranks(side.ranks)} {verb} {what}"


def _describe_waiters(side: Side) -> str:
    is_single = len(side.ranks) == 1
    if side.call is None:
        return f"{name_ranks(side.ranks)} {'has' if is_single else 'have'} ended"
    place = "" if side.position is None else f" at position {side.position}"
    verb = "waits" if is_single else "wait"
    call = _describe(side.call)
    if side.call.op == NEW_GROUP:
        return f"{name_ranks(side.ranks)} {verb} in {call} for all other ranks"
    return f"{name_ranks(side.ranks)} {verb} in {call}{place} of group {side.call.group}"
