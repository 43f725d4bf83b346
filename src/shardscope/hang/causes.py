"""The likely causes of a hang: their classes, the responsible ranks, and how certain they are.

What a log says happened to a rank comes first, then ranks that diverge, then ranks that are behind
or wait for each other, then what all ranks are stuck in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from shardscope.hang.cause_text import describe_rank, make_cause
from shardscope.hang.compile_causes import explain_compilations
from shardscope.hang.divergence_causes import explain_divergence, find_first
from shardscope.hang.first_wait import find_wait
from shardscope.hang.mismatch import Divergence, explain_mismatches
from shardscope.hang.rank_causes import (
    explain_failures,
    explain_stacks,
    explain_timeouts,
    explain_unreachable,
)
from shardscope.hang.run import HangRun
from shardscope.hang.stuck_causes import explain_stuck
from shardscope.hang.wait_causes import explain_state
from shardscope.hang.waits import HangKind, HangState, RunState
from shardscope.record.hang_records import CauseKind, Certainty, HangCause
from shardscope.record.ranks import expand_ranks
from shardscope.record.recording import Finding

_MAX_CAUSES = 8
_MAX_DIVERGENCES = 4
# Classes that say less than any other of the same ranks.
_VAGUE = (CauseKind.SLOW, CauseKind.LOST, CauseKind.UNKNOWN, CauseKind.NETWORK)


def find_causes(
    run: HangRun,
    state: HangState | None,
    run_state: RunState,
    diverged: Mapping[str, Divergence],
) -> list[HangCause]:
    """The likely causes, the best supported first; empty if nothing waits and nothing failed."""
    causes = [*explain_failures(run, state), *explain_unreachable(run, state)]
    if diverged:
        causes.extend(_explain_divergences(run, diverged, state))
    is_stuck = state is None or state.kind is HangKind.STUCK
    if state is not None and not is_stuck:
        causes.append(explain_state(run, state, run_state))
    causes.extend(explain_compilations(run))
    if is_stuck and not diverged:
        causes.extend(explain_stuck(run))
        causes.extend(_explain_unpaired(run))
    if not causes:
        causes.extend(explain_stacks(run))
    if not causes:
        causes.extend(explain_timeouts(run))
    return _order(causes, state)[:_MAX_CAUSES]


def _order(causes: Iterable[HangCause], state: HangState | None) -> list[HangCause]:
    """The most certain first; without those that say less of the same ranks."""
    levels = list(Certainty)
    ordered = sorted(causes, key=lambda cause: levels.index(cause.certainty))
    kept: list[HangCause] = []
    for cause in ordered:
        ranks = set(expand_ranks(cause.ranks))
        is_covered = any(ranks <= set(expand_ranks(known.ranks)) for known in kept)
        if not (is_covered and (cause.kind in _VAGUE or _is_repeated(cause, kept))):
            kept.append(cause)
    return kept


def _is_repeated(cause: HangCause, kept: Iterable[HangCause]) -> bool:
    return any(
        (cause.kind, cause.ranks, cause.group) == (known.kind, known.ranks, known.group)
        for known in kept
    )


def _explain_divergences(
    run: HangRun, diverged: Mapping[str, Divergence], state: HangState | None
) -> Iterator[HangCause]:
    """The group that diverged first, then the others that did."""
    first = find_first(run, diverged)
    names = [first, *(name for name in diverged if name != first)][:_MAX_DIVERGENCES]
    for name in names:
        divergence = diverged[name]
        group = run.groups[name].calls
        (finding,) = explain_mismatches({name: group}, {name: divergence})
        cause = explain_divergence(run, name, divergence)
        rank = cause.ranks[0]
        wait = find_wait(run, state, cause.ranks)
        call = group[rank].collectives.get(divergence.position)
        certainty = cause.certainty if name == first else Certainty.POSSIBLE
        yield make_cause(
            cause.kind,
            certainty,
            cause.ranks,
            [finding.fact],
            evidence=[*cause.evidence, *(describe_rank(run, own) for own in cause.ranks[:2])],
            group=name,
            position=divergence.position,
            source=call.source if call is not None else finding.source,
            where="there" if wait is None else "before that",
        )


def _explain_unpaired(run: HangRun) -> Iterator[HangCause]:
    """A send or receive whose counterpart differs, where nothing waits."""
    for name, group in run.calls.items():
        if not any(calls.transfers for calls in group.values()):
            continue
        findings: list[Finding] = explain_mismatches({name: group}, {})
        for finding in findings:
            yield make_cause(
                CauseKind.UNMATCHED_TRANSFER,
                Certainty.LIKELY,
                [] if finding.rank is None else [finding.rank],
                [finding.fact],
                group=name,
                source=finding.source,
            )
