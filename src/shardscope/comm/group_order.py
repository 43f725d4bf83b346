"""Collectives of each recorded rank by group and in order, and sends paired with receives."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import zip_longest

from msgspec import Struct
from msgspec.structs import replace

from shardscope.record.kinds import CollectiveKind
from shardscope.record.ranks import list_ranks
from shardscope.record.recording import (
    Collective,
    Finding,
    Recording,
    Severity,
    list_calls_by_group,
)
from shardscope.record.source import Phase

RANK_MISMATCH = "rank-mismatch"
P2P_KINDS = (CollectiveKind.SEND, CollectiveKind.RECV)


class RankCalls(Struct, frozen=True):
    """What one rank issued in one group, as far as its recording shows."""

    collectives: dict[int, Collective]  # by position among the group's collectives
    transfers: list[Collective]  # sends and receives, up to the first that may be missing
    is_known: bool  # what is not here was not issued before the recording stops
    is_finished: bool  # and the rank left its trace normally, so it was never issued

    @property
    def num_collectives(self) -> int:
        """The number of positions that the rank has reached."""
        return max(self.collectives, default=-1) + 1


GroupCalls = dict[int, RankCalls]
"""What the recorded ranks of one group issued; a rank that issued nothing is there too."""


def sort_by_group(recording: Recording) -> dict[str, GroupCalls]:
    """The calls of every group in which any recorded rank issued one."""
    calls = list_calls_by_group(recording)
    lossy = {gap.rank for gap in recording.gaps if gap.is_loss}
    lossy -= {stop.rank for stop in recording.stops if stop.is_gapless}
    stopped = {stop.rank for stop in recording.stops}
    return {
        name: _read_group(by_rank, lossy=lossy, stopped=stopped) for name, by_rank in calls.items()
    }


def _read_group(
    by_rank: dict[int, list[Collective]], *, lossy: set[int | None], stopped: set[int]
) -> GroupCalls:
    has_transfers = any(call.kind in P2P_KINDS for calls in by_rank.values() for call in calls)
    group = {}
    for rank in sorted(by_rank):
        is_known = rank not in lossy and None not in lossy
        rank_calls = _read_rank(by_rank[rank], is_known=is_known, has_transfers=has_transfers)
        group[rank] = replace(rank_calls, is_finished=rank_calls.is_known and rank not in stopped)
    return group


def _read_rank(calls: list[Collective], *, is_known: bool, has_transfers: bool) -> RankCalls:
    """Each call at its position in the group, even if calls before it are missing."""
    collectives: dict[int, Collective] = {}
    transfers: list[Collective] = []
    position = -1
    for index, call in enumerate(sorted(calls, key=lambda call: call.group_order)):
        position = max(position + 1, call.group_order)
        if position > index:
            is_known = False
            if has_transfers:
                break  # missing calls may be of either kind, so later positions are unknown
        if call.kind in P2P_KINDS:
            transfers.append(call)
        else:
            collectives[position - len(transfers)] = call
    return RankCalls(collectives, transfers, is_known, is_known)


def find_drift(group: GroupCalls, late: int, other_ranks: Iterable[int]) -> str | None:
    """Text on the first position at which a rank's line differs from that of all other ranks."""
    other_calls = [group[rank].collectives for rank in other_ranks]
    for position, call in sorted(group[late].collectives.items()):
        lines = {line_of(calls[position]) for calls in other_calls if position in calls}
        if len(lines) == 1 and (line := lines.pop()) and line_of(call) not in ("", line):
            return (
                f"the lines first differ at position {position}, {line_of(call)} on rank {late} "
                f"and {line} on the others: a collective may have been skipped there"
            )
    return None


def line_of(call: Collective | None) -> str:
    """`train.py:12`, or an empty string if the line is unknown."""
    return "" if call is None or call.source is None else f"{call.source.file}:{call.source.line}"


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-7`."""
    distinct = set(ranks)
    return f"rank{'s' if len(distinct) > 1 else ''} {list_ranks(distinct)}"


def payload_bytes(call: Collective) -> int:
    """The size of the data, whether this rank sends or receives it."""
    return max(call.input_bytes, call.output_bytes)


def describe_call(call: Collective) -> str:
    """Kind, dtype, size, module, phase and line of a call, as text."""
    parts = [str(call.kind), call.dtype, f"{payload_bytes(call):,} bytes"]
    if call.reduce_op is not None:
        parts.append(f"op {call.reduce_op}")
    if call.peer is not None:
        parts.append(f"peer {call.peer}")
    elif call.kind is CollectiveKind.RECV:
        parts.append("from any rank")
    return f"{' '.join(part for part in parts if part)} ({_describe_location(call)})"


def _describe_location(call: Collective) -> str:
    parts = ["outside any module" if call.owner is None else call.owner or "the root module"]
    if call.phase is not Phase.OUTSIDE:
        parts.append(str(call.phase))
    if line := line_of(call):
        parts.append(line)
    return ", ".join(parts)


# Sender and receiver.
Route = tuple[int, int]


def find_unpaired(name: str, group: GroupCalls) -> list[Finding]:
    """At most one finding: the first send or receive without its counterpart."""
    sends, receives, from_anyone = sort_by_route(group)
    problems: list[tuple[int, int, Finding]] = []
    for route in sorted(sends.keys() | receives.keys()):
        sender, receiver = route
        # A receive from any rank may match any send to its rank, so nothing is certain there.
        if sender not in group or receiver not in group or receiver in from_anyone:
            continue
        problem = _find_problem(name, route, sends[route], receives[route], group)
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
        problems.append((call.group_order, receiver, _make_finding(name, fact, call)))
    return [finding for _, _, finding in sorted(problems, key=lambda item: item[:2])[:1]]


def sort_by_route(
    group: GroupCalls,
) -> tuple[dict[Route, list[Collective]], dict[Route, list[Collective]], set[int]]:
    """Sends and receives by route, in order, and the ranks that receive from any rank."""
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


def find_unsent(group: GroupCalls) -> dict[int, Collective]:
    """By rank, its first receive from any rank for which no rank of the group sent a message.

    Empty if what some rank of the group sent is not known.
    """
    transfers = [call for calls in group.values() for call in calls.transfers]
    is_known = all(calls.is_known for calls in group.values())
    if not transfers or len(group) < transfers[0].num_ranks or not is_known:
        return {}
    num_sent = Counter(call.peer for call in transfers if call.kind is CollectiveKind.SEND)
    unsent: dict[int, Collective] = {}
    for rank, calls in group.items():
        receives = [call for call in calls.transfers if call.kind is CollectiveKind.RECV]
        if num_sent[rank] < len(receives) and receives[num_sent[rank]].peer is None:
            unsent[rank] = receives[num_sent[rank]]
    return unsent


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
