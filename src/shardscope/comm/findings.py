"""Findings of a trace: implicit redistributions, ranks that disagree, and hangs.

`match_ranks` compares the collectives of the recorded ranks of each group, in order;
`find_comm_problems` finds what each rank shows by itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import zip_longest

from msgspec import Struct
from msgspec.structs import replace

from shardscope.comm.hang import (
    DEADLOCK,
    RANK_BEHIND,
    UNKNOWN_TAGS,
    find_hang,
    find_unknown_waits,
)
from shardscope.comm.rank_calls import (
    RANK_MISMATCH,
    GroupCalls,
    Route,
    describe_call,
    find_drift,
    find_unsent,
    name_ranks,
    payload_bytes,
    sort_by_group,
    sort_by_route,
)
from shardscope.record.base import CollectiveKind
from shardscope.record.layer_names import fold_layers
from shardscope.record.recording import (
    Collective,
    Finding,
    Recording,
    Redistribute,
    Severity,
)
from shardscope.record.traffic import TrafficTotals, choose_busiest, count_traffic
from shardscope.record.units import format_bytes

IMPLICIT_ALL_TO_ALL = "implicit-all-to-all"
IMPLICIT_GATHER = "implicit-gather"

_RULES = {
    CollectiveKind.ALL_GATHER: (IMPLICIT_GATHER, "all-gather"),
    CollectiveKind.ALL_TO_ALL: (IMPLICIT_ALL_TO_ALL, "all-to-all"),
}
_MIN_BYTES = 1024**2


def find_comm_problems(recording: Recording) -> tuple[Finding, ...]:
    """Findings that each rank shows by itself; `match_ranks` compares ranks."""
    implicit: dict[tuple[CollectiveKind, str | None, str], list[Collective]] = defaultdict(list)
    for call in recording.collectives:
        cause = call.cause
        if isinstance(cause, Redistribute) and _is_worth_a_finding(call, cause):
            # Layers of a stack share a problem, so they share a finding.
            owner = call.owner and fold_layers(call.owner)
            implicit[call.kind, owner, cause.asked_by].append(call)
    return tuple(
        _explain_redistribution(pattern, asked_by, calls)
        for (_, pattern, asked_by), calls in implicit.items()
    )


def _is_worth_a_finding(call: Collective, cause: Redistribute) -> bool:
    return cause.is_implicit and call.kind in _RULES and call.output_bytes >= _MIN_BYTES


def _explain_redistribution(pattern: str | None, asked_by: str, calls: list[Collective]) -> Finding:
    first = calls[0]
    rule, name = _RULES[first.kind]
    owners = {call.owner for call in calls}
    ranks = {call.rank for call in calls}
    outside = "outside any module" if first.owner is None else "the root module"
    subject = (pattern if len(owners) > 1 else first.owner) or outside
    on_ranks = f" on {name_ranks(ranks)}" if len(ranks) > 1 else ""
    cause = first.cause
    assert isinstance(cause, Redistribute)
    op = asked_by.removesuffix(".default")
    received = format_bytes(sum(call.output_bytes for call in calls))
    totals: defaultdict[int, TrafficTotals] = defaultdict(TrafficTotals)
    for call in sorted(calls, key=lambda call: call.rank):
        totals[call.rank] += count_traffic(call)
    busiest = choose_busiest(totals.values())
    return Finding(
        rule=rule,
        severity=Severity.WARNING,
        subject=subject,
        fact=f"{op} cannot run on its input as it is sharded, so DTensor inserted an implicit "
        f"{name} ({', '.join(cause.before)} → {', '.join(cause.after)}): "
        f"{_count_calls(calls)}{on_ranks}, {received} received",
        remedy=f"Give {op} inputs whose placements it can use, or redistribute explicitly "
        "where the tensor is smallest.",
        rank=first.rank if len(ranks) == 1 else None,
        source=first.source,
        num_collectives=busiest.count,
        sent_bytes=busiest.wire_bytes,
    )


def _count_calls(calls: list[Collective]) -> str:
    """`4 calls, one in each of blocks.0 … blocks.3`."""
    count = "1 call" if len(calls) == 1 else f"{len(calls):,} calls"
    owners = sorted({call.owner or "the root module" for call in calls}, key=_number_layers)
    if len(owners) == 1:
        return count
    counts = Counter((call.owner, call.rank) for call in calls).values()
    named = " and ".join(owners) if len(owners) == 2 else f"{owners[0]} … {owners[-1]}"
    if set(counts) == {1}:
        return f"{count}, one in each of {named}"
    return f"{count}, in {named} ({len(owners):,} modules)"


def _number_layers(name: str) -> list[tuple[int, str]]:
    """A sort key by which layers.10 comes after layers.9."""
    return [(int(part) if part.isdecimal() else -1, part) for part in name.split(".")]


_MAX_SIDES = 4
_ROOTED = (
    CollectiveKind.BROADCAST,
    CollectiveKind.REDUCE,
    CollectiveKind.GATHER,
    CollectiveKind.SCATTER,
)
_REDUCING = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE, CollectiveKind.REDUCE_SCATTER)

# Properties that must be equal on all ranks, as (word used in a finding, value).
Facets = tuple[tuple[str, object], ...]


class _Divergence(Struct, frozen=True):
    """The first position at which the ranks of a group disagree.

    `sides` maps the facets to the ranks that have them; `()` is for ranks without a collective.
    """

    position: int
    sides: dict[Facets, list[int]]


def match_ranks(recording: Recording) -> tuple[Finding, ...]:
    """A finding for the first position in each group at which its recorded ranks disagree.

    For a run that was killed or raised, also the ranks that are behind or in a deadlock.
    """
    findings: list[Finding] = []
    diverged: dict[str, int] = {}
    groups = sort_by_group(recording)
    for name, group in groups.items():
        divergence = _find_divergence(group)
        if divergence is not None:
            diverged[name] = divergence.position
            findings.append(_explain(name, divergence, group))
        elif any(calls.transfers for calls in group.values()):
            findings.extend(_find_unpaired(name, group))
    return (*findings, *find_hang(recording, groups, diverged))


def _find_divergence(group: GroupCalls) -> _Divergence | None:
    issuers: dict[int, list[int]] = defaultdict(list)
    for rank, calls in group.items():
        for position in calls.collectives:
            issuers[position].append(rank)
    # A finished rank has all positions up to its last, so the shortest is the first to lack one.
    finished = {rank: calls for rank, calls in group.items() if calls.is_finished}
    shortest = min((calls.num_collectives for calls in finished.values()), default=None)
    for position, ranks in sorted(issuers.items()):
        sides: dict[Facets, list[int]] = defaultdict(list)
        for rank in ranks:
            sides[_facets(group[rank].collectives[position])].append(rank)
        if shortest is not None and position >= shortest:
            sides[()] = [
                rank for rank, calls in finished.items() if calls.num_collectives <= position
            ]
        if len(sides) > 1:
            return _Divergence(position, sides)
    return None


def _facets(call: Collective) -> Facets:
    kind = call.kind
    if kind == CollectiveKind.BARRIER:
        return (("kind", kind),)
    facets: list[tuple[str, object]] = [("kind", kind), ("dtype", call.dtype)]
    if kind in _REDUCING:
        facets.append(("reduce op", call.reduce_op))
    if kind in _ROOTED:
        facets.append(("root", call.peer))
    num_bytes = _common_bytes(call)
    if num_bytes is not None:
        facets.append(("size", num_bytes))
    return tuple(facets)


def _common_bytes(call: Collective) -> int | None:
    """The size that must be equal on all ranks; None if ranks may differ (uneven splits)."""
    match call.kind:
        case CollectiveKind.ALL_GATHER:
            return call.output_bytes
        case CollectiveKind.REDUCE_SCATTER:
            return call.input_bytes
        case CollectiveKind.ALL_REDUCE | CollectiveKind.BROADCAST | CollectiveKind.REDUCE:
            # In a broadcast or reduce, some ranks have no input and some no output.
            return payload_bytes(call)
    return None


def _explain(name: str, divergence: _Divergence, group: GroupCalls) -> Finding:
    position, sides = divergence.position, divergence.sides
    # Report a rank of the smallest side; of two equal sides, of the one that stopped.
    by_size = sorted(sides, key=lambda facets: (len(sides[facets]), bool(facets), sides[facets]))
    rank = sides[by_size[0]][0]
    calls = group[rank].collectives
    call = calls.get(position)
    last_call = call or (calls[max(calls)] if calls else None)
    shown = [_describe_side(position, sides[facets], group) for facets in reversed(by_size)]
    if (num_hidden := len(shown) - _MAX_SIDES) > 0:
        shown[_MAX_SIDES:] = [f"{num_hidden} more variant{'s' if num_hidden > 1 else ''}"]
    if call is None and (drift := find_drift(group, rank, sides[by_size[-1]][:_MAX_SIDES])):
        shown.append(drift)
    if unknown := set(group).difference(*sides.values()):
        shown.append(_describe_unknown(unknown, group))
    return Finding(
        rule=RANK_MISMATCH,
        severity=Severity.ERROR,
        subject=f"group {name}",
        fact=f"ranks disagree on {_name_differences(sides)} at position {position} of group "
        f"{name}: " + "; ".join(shown),
        remedy="Make every rank of the group take the same branch and pass the same shapes and "
        "dtypes there; a real run hangs or mixes up data at this point.",
        rank=rank,
        source=None if last_call is None else last_call.source,
    )


def _describe_side(position: int, ranks: list[int], group: GroupCalls) -> str:
    calls = group[ranks[0]].collectives
    if position in calls:
        return f"{name_ranks(ranks)} issued {describe_call(calls[position])}"
    last = f" after {describe_call(calls[max(calls)])}" if calls else ""
    return f"{name_ranks(ranks)} issued nothing{last}"


def _describe_unknown(ranks: set[int], group: GroupCalls) -> str:
    """Text on ranks without a collective there that may have issued one unrecorded."""
    stopped = {rank for rank in ranks if group[rank].is_known}
    lossy = ranks - stopped
    words = []
    if stopped:
        words.append(f"{name_ranks(stopped)} stopped before")
    if lossy:
        words.append(f"not known of {name_ranks(lossy)}, whose recording lost records")
    return "; ".join(words)


def _name_differences(sides: Iterable[Facets]) -> str:
    present = [dict(facets) for facets in sides if facets]
    words = dict.fromkeys(word for facets in present for word in facets)
    kinds = {facets["kind"] for facets in present}
    if len(kinds) > 1:
        return "kind"
    differing = [word for word in words if len({facets.get(word) for facets in present}) > 1]
    return " and ".join(differing) or "whether there is a collective"


def _find_unpaired(name: str, group: GroupCalls) -> list[Finding]:
    """At most one finding: the first send or receive without its counterpart."""
    sends, receives, from_anyone = sort_by_route(group)
    problems: list[tuple[int, int, Finding]] = []
    for route in sorted(sends.keys() | receives.keys()):
        sender, receiver = route
        # A receive from any rank may match any send to its rank, so nothing is certain there.
        if sender not in group or receiver not in group or receiver in from_anyone:
            continue
        problem = _find_transfer_problem(name, route, sends[route], receives[route], group)
        if problem is not None:
            problems.append(problem)
    unsent = find_unsent(group)
    senders = group.keys() - unsent.keys()
    if unsent and senders and all(group[rank].is_finished for rank in senders):
        receiver, call = next(iter(unsent.items()))
        fact = (
            f"no rank sends what rank {receiver} waits for: {describe_call(call)}, although "
            f"{name_ranks(senders)} ended"
        )
        problems.append((call.group_order, receiver, _make_transfer_finding(name, fact, call)))
    return [finding for _, _, finding in sorted(problems, key=lambda item: item[:2])[:1]]


def _find_transfer_problem(
    name: str,
    route: Route,
    sends: list[Collective],
    receives: list[Collective],
    group: GroupCalls,
) -> tuple[int, int, Finding] | None:
    sender, receiver = route
    for position, (send, receive) in enumerate(zip_longest(sends, receives)):
        silent = sender if send is None else receiver if receive is None else None
        if silent is not None and not group[silent].is_finished:
            return None
        fact = _compare_ends(route, send, receive)
        if fact is not None:
            call = send or receive
            finding = _make_transfer_finding(
                name, f"{fact} (transfer {position} of that route)", call
            )
            return call.group_order, call.rank, finding
    return None


def _compare_ends(route: Route, send: Collective | None, receive: Collective | None) -> str | None:
    sender, receiver = route
    if receive is None and send is not None:
        return f"rank {receiver} never receives what rank {sender} sent it: " + (
            describe_call(send)
        )
    if send is None and receive is not None:
        return f"rank {sender} never sends what rank {receiver} waits for: " + (
            describe_call(receive)
        )
    assert send is not None
    assert receive is not None
    differing = [
        word
        for word, sent, received in (
            ("size", payload_bytes(send), payload_bytes(receive)),
            ("dtype", send.dtype, receive.dtype),
        )
        if sent != received
    ]
    if not differing:
        return None
    return (
        f"the two ends differ in {' and '.join(differing)}: rank {sender}'s {describe_call(send)}, "
        f"rank {receiver}'s {describe_call(receive)}"
    )


def _make_transfer_finding(name: str, fact: str, call: Collective) -> Finding:
    return Finding(
        rule=RANK_MISMATCH,
        severity=Severity.ERROR,
        subject=f"group {name}",
        fact=f"in group {name}, {fact}",
        remedy="Give every send one receive of the same size and dtype on the other rank; "
        "a real run hangs or mixes up data at this point.",
        rank=call.rank,
        source=call.source,
    )


_FINDING_RULES = (DEADLOCK, IMPLICIT_ALL_TO_ALL, IMPLICIT_GATHER, RANK_BEHIND, RANK_MISMATCH)


def review(recording: Recording) -> Recording:
    """Compute this package's findings anew, and keep all other findings."""
    # A merged recording has more ranks than the ones its findings were computed from.
    gaps = [gap for gap in recording.gaps if not gap.fact.endswith(UNKNOWN_TAGS)]
    gaps += find_unknown_waits(recording, sort_by_group(recording))
    other_findings = [
        finding for finding in recording.findings if finding.rule not in _FINDING_RULES
    ]
    findings = (*match_ranks(recording), *find_comm_problems(recording), *other_findings)
    return replace(recording, findings=findings, gaps=tuple(gaps))
