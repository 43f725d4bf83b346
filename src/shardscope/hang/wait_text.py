"""Sentences on ranks that wait: findings for a rank behind, a deadlock, and a missing recording."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from shardscope.hang.dumped_calls import DumpedCall
from shardscope.hang.evidence.failures import is_failure
from shardscope.hang.rank_calls import (
    GroupCalls,
    IssuedCall,
    RankCalls,
    Wait,
    Waiting,
    describe_call,
    find_drift,
    line_of,
    name_ranks,
)
from shardscope.record.base import CollectiveKind
from shardscope.record.recording import Finding, Gap, Severity, Stop

DEADLOCK = "deadlock"
RANK_BEHIND = "rank-behind"

_MAX_NAMED = 4  # waits, positions and edges of a cycle that a sentence lists


def explain_behind(
    behind: list[int],
    waits: Iterable[Wait],
    waiting: set[int],
    stops: Mapping[int, Stop],
    last: Mapping[int, IssuedCall],
    groups: Mapping[str, GroupCalls],
) -> Finding:
    """The finding for ranks that others wait for; `waiting` are all ranks that wait."""
    direct = [wait for wait in waits if not set(behind).isdisjoint(wait.missing)]
    waiters = {rank for wait in direct for rank in wait.waiters}
    facts = [f"{name_ranks(behind)} {'is' if len(behind) == 1 else 'are'} behind"]
    facts.extend(_describe_waiters(wait) for wait in direct[:_MAX_NAMED])
    if len(direct) > _MAX_NAMED:
        facts.append(f"{len(direct) - _MAX_NAMED:,} more collectives wait for them")
    if rest := waiting - waiters:
        facts.append(f"{name_ranks(rest)} {_verb(rest)} for those in turn")
    facts.extend(_describe_states(behind, stops, last))
    collective = next((wait for wait in direct if wait.position is not None), None)
    if collective is not None:
        waiting_ranks = sorted(collective.waiters)[:_MAX_NAMED]
        drift = find_drift(groups[collective.group], collective.missing[0], waiting_ranks)
        facts.extend([drift] if drift else [])
    has_raised = any(is_failure(stops[rank].error) for rank in behind)
    has_failed_others = any(is_failure(stops[rank].error) for rank in waiters if rank in stops)
    last_call = last.get(behind[0])
    return Finding(
        rule=RANK_BEHIND,
        severity=Severity.ERROR if has_raised or has_failed_others else Severity.WARNING,
        subject=_name_groups(direct),
        fact="; ".join(facts),
        remedy=_suggest_remedy(behind, last_call, has_raised=has_raised, is_over=has_failed_others),
        rank=behind[0],
        source=None if last_call is None else last_call.source,
    )


def _describe_states(
    ranks: list[int], stops: Mapping[int, Stop], last: Mapping[int, IssuedCall]
) -> Iterator[str]:
    """The last collective of each rank; ranks with the same one are listed together."""
    ranks_by_state: dict[str, list[int]] = {}
    for rank in ranks:
        state = describe_state(stops[rank], last.get(rank))
        ranks_by_state.setdefault(state, []).append(rank)
    for state, ranks_there in list(ranks_by_state.items())[:_MAX_NAMED]:
        yield f"{name_ranks(ranks_there)} {state}"
    num_more = sum(map(len, list(ranks_by_state.values())[_MAX_NAMED:]))
    if num_more:
        yield f"{num_more:,} more {'rank' if num_more == 1 else 'ranks'} stopped elsewhere"


def describe_state(stop: Stop, last: IssuedCall | None) -> str:
    """What a rank did last, without its name."""
    if last is None:
        state = "issued no collective"
    else:
        state = f"last issued {describe_call(last)} in group {last.group}"
    if stop.error is not None:
        return f"{state}, then raised {stop.error}"
    phases = [begin.name for begin in stop.open_spans if not begin.thread]
    where = f" in phase {' > '.join(phases)}" if phases else ""
    is_dumped = isinstance(last, DumpedCall) and not last.is_located
    end = "its dump was written" if is_dumped else "the recording stops"
    return f"{state} before {end}{where}"


def explain_unrecorded(wait: Wait, unknown: list[int], group: Mapping[int, RankCalls]) -> Finding:
    """The finding for a group whose recorded ranks all stopped, and whose others left nothing."""
    recorded = sorted(wait.waiters)
    last = wait.waiters[recorded[0]]
    has_files = any(rank in group for rank in unknown)
    fact = (
        f"{name_ranks(recorded)} stopped after issuing {describe_call(last)} at position "
        f"{wait.position} of group {wait.group}; {name_ranks(unknown)}, which must issue it too, "
        f"left no {'complete ' if has_files else ''}recording and may be behind"
    )
    return Finding(
        rule=RANK_BEHIND,
        severity=Severity.WARNING,
        subject=f"group {wait.group}",
        fact=fact,
        remedy=f"Read the log of {name_ranks(unknown)}, and merge the recording again "
        "with the others if it can be found.",
        rank=unknown[0],
        source=last.source,
    )


def describe_pairs(
    group: str, pairs: list[tuple[IssuedCall, IssuedCall]], unknown_tags: str
) -> Gap:
    """The gap for a send and a receive that match if their tags are equal."""
    send, receive = pairs[0]
    more = f" (and {len(pairs) - 1:,} more such pairs)" if len(pairs) > 1 else ""
    return Gap(
        place=f"group {group}",
        fact=f"rank {send.rank} stopped after issuing {describe_call(send)} and rank "
        f"{receive.rank} after issuing {describe_call(receive)}{more}: if their tags differ, the "
        f"two ranks wait for each other; {unknown_tags}",
    )


def explain_cycle(
    cycle: list[int], waiting: Waiting, *, also: Iterable[int] = (), is_certain: bool = True
) -> Finding:
    """The finding for a cycle of waits; `also` are further ranks that wait."""
    calls: list[IssuedCall] = []
    waits: list[Wait] = []
    edges: list[str] = []
    for rank, target in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
        wait = next(wait for wait in waiting[rank] if target in wait.missing)
        calls.append(wait.waiters[rank])
        waits.append(wait)
        edges.append(f"rank {rank} waits for rank {target} in {_describe_wait(wait, rank)}")
    if len(edges) > _MAX_NAMED:
        edges[_MAX_NAMED - 1 : -1] = [f"… {len(edges) - _MAX_NAMED:,} more …"]
    is_receives = all(call.kind is CollectiveKind.RECV for call in calls)
    cycle_words = "a deadlock of receives" if is_receives else "a deadlock"
    hedge = "" if is_certain else ", unless one of them was busy elsewhere when it stopped"
    fact = f"{cycle_words}: {'; '.join(edges)}{hedge}"
    if rest := {*waiting, *also} - set(cycle):
        fact += f"; {name_ranks(rest)} {_verb(rest)} too"
    return Finding(
        rule=DEADLOCK,
        severity=Severity.ERROR if is_certain else Severity.WARNING,
        subject=f"{name_ranks(cycle)}, {_name_groups(waits)}",  # of several ranks: no `rank`
        fact=fact,
        remedy=suggest_order(calls),
        source=calls[0].source,
    )


def suggest_order(calls: list[IssuedCall]) -> str:
    kinds = {call.kind for call in calls}
    if kinds == {CollectiveKind.RECV}:
        return (
            "Let one of these ranks send before it receives, or issue sends and receives together "
            "with batch_isend_irecv."
        )
    if kinds <= {CollectiveKind.SEND, CollectiveKind.RECV}:
        return (
            "Order the transfers so that each send meets its receive, or issue them together with "
            "batch_isend_irecv."
        )
    return "Issue the collectives and transfers of these groups in the same order on every rank."


def _suggest_remedy(
    behind: list[int], last: IssuedCall | None, *, has_raised: bool, is_over: bool
) -> str:
    names = name_ranks(behind)
    if has_raised:
        return f"Fix what {names} raised first: the other ranks only waited for it."
    line = line_of(last)
    where = f"after {line}" if line else "before its first collective"
    if is_over:
        return (
            f"Find out in the log of {names} why it ended or was stuck {where} (out of memory?): "
            "the errors of the other ranks follow from it."
        )
    return (
        f"Look at what {names} did {where}: every rank of the group must issue the same "
        "collectives. If the run was killed while it still made progress, this is only where it "
        "was slowest."
    )


def _describe_waiters(wait: Wait) -> str:
    ranks = sorted(wait.waiters)
    words = _describe_wait(wait, ranks[0])
    missing = name_ranks(wait.missing)
    if wait.is_any:
        missing = f"any of {name_ranks(set(wait.missing).difference(ranks) or ranks)}"
    return f"{name_ranks(ranks)} {_verb(ranks)} for {missing} in {words}"


def _describe_wait(wait: Wait, rank: int) -> str:
    location = "in" if wait.position is None else f"at position {wait.position} of"
    return f"{describe_call(wait.waiters[rank])} {location} group {wait.group}"


def _name_groups(waits: Iterable[Wait]) -> str:
    names = list(dict.fromkeys(wait.group for wait in waits))
    more = f" and {len(names) - _MAX_NAMED:,} more" if len(names) > _MAX_NAMED else ""
    return f"group{'s' if len(names) > 1 else ''} {', '.join(names[:_MAX_NAMED])}{more}"


def _verb(ranks: Iterable[int]) -> str:
    return "waits" if len(set(ranks)) == 1 else "wait"
