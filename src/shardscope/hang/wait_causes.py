"""Causes of ranks that wait: others that are behind, that wait in turn, or that left nothing."""

from __future__ import annotations

from collections.abc import Iterator

from shardscope.hang.cause_text import (
    describe_place,
    describe_rank,
    describe_waiters,
    find_source,
    make_cause,
)
from shardscope.hang.dumped_calls import DumpedCall
from shardscope.hang.evidence import CallState, EventKind, FileFormat
from shardscope.hang.first_wait import find_wait
from shardscope.hang.history import Deviation
from shardscope.hang.rank_calls import P2P_KINDS, Wait, describe_call, name_ranks
from shardscope.hang.run import HangRun
from shardscope.hang.skipped_calls import describe_deviation, find_skipped, list_deviating
from shardscope.hang.waits import HangKind, HangState, RunState, explain_hang
from shardscope.record.hang_records import CauseKind, Certainty, HangCause

_MAX_RANKS = 8  # whose skipped calls are looked for
_MAX_DEVIATING = 64  # ranks outside of a cycle that are compared with their earlier steps


def explain_state(run: HangRun, state: HangState, run_state: RunState) -> HangCause:
    """The cause that the graph of waits shows."""
    match state.kind:
        case HangKind.BEHIND:
            return _explain_behind(run, state, run_state)
        case HangKind.CYCLE:
            return _explain_cycle(run, state, run_state)
    return _explain_unrecorded(run, state)


def _explain_behind(run: HangRun, state: HangState, run_state: RunState) -> HangCause:
    """Ranks that others wait for: they went past the call, are busy elsewhere, or do not say."""
    ranks = _choose_behind(run, state)
    wait = find_wait(run, state, ranks)
    assert wait is not None
    finding = explain_hang(state, run_state, run.calls)
    skipped = {
        rank: reason
        for rank in ranks[:_MAX_RANKS]
        if (reason := find_skipped(run, rank, wait)) is not None
    }
    evidence = [f"rank {rank}: {reason}" for rank, reason in skipped.items()]
    evidence += [describe_rank(run, rank, has_last=False) for rank in ranks[:3]]
    if skipped:
        return make_cause(
            CauseKind.SKIPPED_CALL,
            Certainty.LIKELY,
            skipped,
            [finding.fact],
            evidence=evidence,
            wait=wait,
            source=find_source(run, next(iter(skipped))),
        )
    kind, certainty = _classify_activity(run, ranks)
    closed = [] if run.activities.keys() & set(ranks) else _list_closed(run, ranks)
    if kind is CauseKind.SLOW and closed:
        evidence.append(
            f"the connections of {name_ranks(closed)} were closed by another process, so one that "
            "they waited for has ended (a signal, or out of memory on its host)"
        )
        kind, certainty = CauseKind.CRASH, Certainty.LIKELY
    elif kind is CauseKind.SLOW and wait.position is None and _is_past(run, ranks[0], wait):
        kind, certainty = CauseKind.UNMATCHED_TRANSFER, Certainty.LIKELY
    return make_cause(
        kind,
        certainty,
        ranks,
        [finding.fact],
        evidence=[*evidence, *_explain_certainty(run, wait)],
        wait=wait,
        source=find_source(run, ranks[0]),
        where=describe_place(run, ranks[0]),
    )


def _choose_behind(run: HangRun, state: HangState) -> list[int]:
    """Of the ranks behind, those that most groups wait for, where transfers are not recorded.

    The others may wait in a send or receive, which then leads on to those.
    """
    formats = {run.groups[wait.group].format for wait in state.waits}
    backends = {run.groups[wait.group].backend for wait in state.waits}
    is_flight = FileFormat.FLIGHT_RECORDER in formats and "gloo" in backends
    if len(state.ranks) < 2 or not (is_flight or FileFormat.NCCL_RAS in formats):
        return state.ranks
    counts = {rank: sum(rank in wait.missing for wait in state.waits) for rank in state.ranks}
    most = max(counts.values())
    return [rank for rank in state.ranks if counts[rank] == most]


def _classify_activity(run: HangRun, ranks: list[int]) -> tuple[CauseKind, Certainty]:
    """What the stacks of ranks say, or the phases that they had entered."""
    for rank in ranks:
        activity = run.activities.get(rank)
        if activity is not None and activity.kind is not None:
            is_named = activity.kind is not CauseKind.SLOW
            return activity.kind, Certainty.CERTAIN if is_named else Certainty.LIKELY
    for rank in ranks:
        if any(event.is_open for piece in run.ranks[rank].evidence for event in piece.compilations):
            return CauseKind.COMPILING, Certainty.LIKELY
    for rank in ranks:
        stop = run.ranks[rank].stop
        phases = [] if stop is None else [begin.name.lower() for begin in stop.open_spans]
        for words, kind in _PHASES:
            if any(word in phase for phase in phases for word in words):
                return kind, Certainty.LIKELY
    has_process = any(run.ranks[rank].has_process for rank in ranks)
    return CauseKind.SLOW, Certainty.LIKELY if has_process else Certainty.POSSIBLE


_PHASES = (
    (("load", "data", "batch", "fetch"), CauseKind.DATA_LOADING),
    (("checkpoint", "save", "write"), CauseKind.FILE_SYSTEM),
    (("compile",), CauseKind.COMPILING),
)


def _list_closed(run: HangRun, ranks: list[int]) -> list[int]:
    """Ranks whose connections to others were closed, where none of these ranks failed visibly."""
    return [
        rank
        for rank, files in run.ranks.items()
        if rank not in ranks and any(event.kind is EventKind.CONNECTION for event in files.events)
    ]


def _is_past(run: HangRun, rank: int, wait: Wait) -> bool:
    """Whether a rank that misses a transfer has issued a later one, or does not wait at all."""
    columns = run.groups[wait.group].columns.get(rank)
    call = next(iter(wait.waiters.values()))
    if columns is None or call.start_ns is None:
        return False
    return any(
        position < 0 and created > call.start_ns
        for position, created in zip(columns.positions, columns.created_ns, strict=True)
    )


def _explain_certainty(run: HangRun, wait: Wait) -> Iterator[str]:
    """How long the waiting ranks have waited, where that is known."""
    call = next(iter(wait.waiters.values()))
    if isinstance(call, DumpedCall) and call.state is CallState.FAILED:
        yield "the waiting ranks gave up: their calls timed out"


def _explain_cycle(run: HangRun, state: HangState, run_state: RunState) -> HangCause:
    """Ranks that wait for each other; those that did something new are named, if any did."""
    finding = explain_hang(state, run_state, run.calls)
    waiting = state.certain if state.is_certain else state.likely
    waits = [wait for rank in state.ranks for wait in waiting.get(rank, ())]
    others = sorted(set(waiting) - set(state.ranks))[:_MAX_DEVIATING]
    deviating = dict(list_deviating(run, [*state.ranks, *others]))
    is_known = bool(deviating) and 2 * len(deviating) <= len(waiting)
    ranks = sorted(deviating) if is_known else state.ranks
    kind = _classify_cycle(waits, [deviating[rank] for rank in ranks if rank in deviating])
    evidence = [describe_deviation(deviation) for deviation in list(deviating.values())[:3]]
    if any(deviation.is_left_out is None for deviation in deviating.values()):
        evidence.append("it may issue the expected call later, or have left it out")
    deviation = deviating.get(ranks[0])
    wait = waits[0] if waits else None
    if deviation is not None:
        return _explain_deviation(
            run, deviation, kind, ranks, finding.fact, evidence, is_certain=state.is_certain
        )
    return make_cause(
        kind,
        Certainty.CERTAIN if state.is_certain else Certainty.LIKELY,
        ranks,
        [finding.fact],
        evidence=[*evidence, *(describe_rank(run, rank) for rank in ranks[:3])],
        wait=wait,
        source=find_source(run, ranks[0]),
    )


def _classify_cycle(waits: list[Wait], deviations: list[Deviation]) -> CauseKind:
    """A call left out, a transfer without its counterpart, or another order of calls."""
    for deviation in deviations:
        if deviation.expected.kind in P2P_KINDS:
            return CauseKind.UNMATCHED_TRANSFER
        if deviation.is_left_out:
            return CauseKind.SKIPPED_CALL
    kinds = {call.kind for wait in waits for call in wait.waiters.values()}
    if kinds <= set(P2P_KINDS) and len(kinds) > 1 and not deviations:
        return CauseKind.UNMATCHED_TRANSFER
    return CauseKind.WRONG_ORDER


def _explain_deviation(
    run: HangRun,
    deviation: Deviation,
    kind: CauseKind,
    ranks: list[int],
    fact: str,
    evidence: list[str],
    *,
    is_certain: bool,
) -> HangCause:
    """The cause at the call that a rank issued in earlier steps, and the others wait in."""
    expected = deviation.expected
    return make_cause(
        kind,
        Certainty.CERTAIN if is_certain else Certainty.LIKELY,
        ranks,
        [fact],
        evidence=[*evidence, *(describe_rank(run, rank) for rank in ranks[:3])],
        group=expected.group,
        position=None if expected.kind in P2P_KINDS else deviation.position,
        source=deviation.actual.source or find_source(run, ranks[0]),
    )


def _explain_unrecorded(run: HangRun, state: HangState) -> HangCause:
    """Ranks that left no calls, and that all others wait for."""
    wait = find_wait(run, state, state.ranks) or state.waits[0]
    ranks = sorted(set(wait.missing).intersection(state.ranks))
    call = next(iter(wait.waiters.values()))
    place = "in" if wait.position is None else f"at position {wait.position} of"
    seen = [rank for rank in ranks if rank in run.ranks]
    what = "left no calls" if seen else "left no file"
    fact = (
        f"all ranks of group {wait.group} with files wait in {describe_call(call)} {place} it, "
        f"and {name_ranks(ranks)}, which must issue it too, {what}"
    )
    kind, certainty = CauseKind.LOST, Certainty.LIKELY
    if seen:
        kind, certainty = _classify_activity(run, seen)
        if kind is CauseKind.SLOW and not any(run.ranks[rank].has_process for rank in seen):
            kind = CauseKind.LOST
    return make_cause(
        kind,
        certainty,
        ranks,
        [fact],
        evidence=[describe_waiters(wait), *(describe_rank(run, rank) for rank in seen[:3])],
        wait=wait,
        source=find_source(run, seen[0]) if seen else call.source,
        where="before that",
    )
