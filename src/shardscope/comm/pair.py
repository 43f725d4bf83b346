"""Do sends meet receives? Pairs the k-th send from a to b with the k-th receive on b from a."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from itertools import zip_longest

from shardscope.comm.side import RANK_MISMATCH, describe_call, payload_bytes
from shardscope.record.kinds import CollectiveKind
from shardscope.record.recording import Collective, Finding, Severity

__all__ = ["find_unpaired"]

# From which rank to which.
Route = tuple[int, int]


def find_unpaired(
    group: str, calls: dict[int, list[Collective]], incomplete: Set[int] = frozenset()
) -> list[Finding]:
    """At most one finding: the first send or receive that no recorded rank answers.

    Of the ranks in `incomplete` the first calls are here, and more may have been issued.
    """
    sends, receives, anonymous = _sort_into_routes(calls)
    problems: list[tuple[int, int, Finding]] = []
    for route in sorted(sends.keys() | receives.keys()):
        sender, receiver = route
        # A receive from anyone may take any send to its rank, so nothing is certain there.
        if sender not in calls or receiver not in calls or receiver in anonymous:
            continue
        problem = _find_problem(group, route, sends[route], receives[route], incomplete)
        if problem is not None:
            problems.append(problem)
    return [finding for _, _, finding in sorted(problems, key=lambda item: item[:2])[:1]]


def _sort_into_routes(
    calls: dict[int, list[Collective]],
) -> tuple[dict[Route, list[Collective]], dict[Route, list[Collective]], set[int]]:
    sends: dict[Route, list[Collective]] = defaultdict(list)
    receives: dict[Route, list[Collective]] = defaultdict(list)
    anonymous: set[int] = set()
    for rank, mine in calls.items():
        for call in mine:
            if call.peer is None:
                anonymous.add(rank)
            elif call.kind == CollectiveKind.SEND:
                sends[rank, call.peer].append(call)
            else:
                receives[call.peer, rank].append(call)
    return sends, receives, anonymous


def _find_problem(
    group: str,
    route: Route,
    sends: list[Collective],
    receives: list[Collective],
    incomplete: Set[int],
) -> tuple[int, int, Finding] | None:
    sender, receiver = route
    for position, (send, receive) in enumerate(zip_longest(sends, receives)):
        if (send is None and sender in incomplete) or (receive is None and receiver in incomplete):
            return None
        fact = _compare(route, send, receive)
        if fact is not None:
            call = send or receive
            finding = _make_finding(group, f"{fact} (transfer {position} of that route)", call)
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


def _make_finding(group: str, fact: str, call: Collective) -> Finding:
    return Finding(
        rule=RANK_MISMATCH,
        severity=Severity.ERROR,
        subject=f"group {group}",
        fact=f"in group {group}, {fact}",
        remedy="Give every send one receive of the same size and dtype on the other rank; "
        "a real run hangs or mixes up data at this point.",
        rank=call.rank,
        source=call.source,
    )
