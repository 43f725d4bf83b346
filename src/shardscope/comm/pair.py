"""Do sends meet receives? Pairs the k-th send from a to b with the k-th receive on b from a."""

from __future__ import annotations

from collections import defaultdict
from itertools import zip_longest

from shardscope.comm.group_calls import RANK_MISMATCH, GroupCalls, describe_call, payload_bytes
from shardscope.record.kinds import CollectiveKind
from shardscope.record.recording import Collective, Finding, Severity

__all__ = ["find_unpaired", "sort_by_route"]

# From which rank to which.
Route = tuple[int, int]


def find_unpaired(name: str, group: GroupCalls) -> list[Finding]:
    """At most one finding: the first send or receive that no recorded rank answers."""
    sends, receives, from_anyone = sort_by_route(group)
    problems: list[tuple[int, int, Finding]] = []
    for route in sorted(sends.keys() | receives.keys()):
        sender, receiver = route
        # A receive from anyone may take any send to its rank, so nothing is certain there.
        if sender not in group or receiver not in group or receiver in from_anyone:
            continue
        problem = _find_problem(name, route, sends[route], receives[route], group)
        if problem is not None:
            problems.append(problem)
    return [finding for _, _, finding in sorted(problems, key=lambda item: item[:2])[:1]]


def sort_by_route(
    group: GroupCalls,
) -> tuple[dict[Route, list[Collective]], dict[Route, list[Collective]], set[int]]:
    """Sends and receives by route, in order, and the ranks that receive from anyone."""
    sends: dict[Route, list[Collective]] = defaultdict(list)
    receives: dict[Route, list[Collective]] = defaultdict(list)
    from_anyone: set[int] = set()
    for rank, calls in group.items():
        for call in calls.transfers:
            if call.peer is None:
                from_anyone.add(rank)
            elif call.kind == CollectiveKind.SEND:
                sends[rank, call.peer].append(call)
            else:
                receives[call.peer, rank].append(call)
    return sends, receives, from_anyone


def _find_problem(
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
        fact = _compare(route, send, receive)
        if fact is not None:
            call = send or receive
            finding = _make_finding(name, f"{fact} (transfer {position} of that route)", call)
            return call.group_order, call.rank, finding
    return None


def _compare(route: Route, send: Collective | None, receive: Collective | None) -> str | None:
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


def _make_finding(name: str, fact: str, call: Collective) -> Finding:
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
