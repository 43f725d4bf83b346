"""What each rank issued in each group, in order, and which ranks wait for which.

A rank waits in a collective, or in a send or receive, that others have not issued; ranks that wait
for each other in a cycle are deadlocked.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from shardscope.hang.dumped_calls import DumpedCall
from shardscope.hang.evidence import TRANSFERS, CallSignature, count_dropped
from shardscope.record.base import CollectiveKind, Phase
from shardscope.record.ranks import list_ranks
from shardscope.record.recording import (
    Call,
    Collective,
    DroppedCollectives,
    Recording,
    list_calls_by_group,
)

RANK_MISMATCH = "rank-mismatch"
P2P_KINDS = TRANSFERS


IssuedCall = Collective | DumpedCall
"""A call of a recording, or of a dump, which knows less of it."""


class RankCalls(Struct, frozen=True):
    """What one rank issued in one group, as far as its recording or dump shows.

    `num_issued` is set where more were issued than are listed; positions below `num_done` are known
    to have completed. `facet_ids` are those of a dump, from position `first` on: they
    are 32-bit numbers, of which equal ones mean equal facets, and 0 that no call is known.
    `dropped` are the numbers of sends and receives before those listed, by kind and peer.
    """

    collectives: Mapping[int, IssuedCall]  # by position among the group's collectives
    transfers: Sequence[IssuedCall]  # sends and receives, up to the first that may be missing
    is_known: bool  # what is not here was not issued before the recording stops
    is_finished: bool  # and the rank left its trace normally, so it was never issued
    num_issued: int = 0
    num_done: int = 0
    first: int = 0
    facet_ids: bytes | None = None
    dropped: Mapping[tuple[CollectiveKind, int | None], int] = {}

    @property
    def num_collectives(self) -> int:
        """The number of positions that the rank has reached."""
        if self.facet_ids is not None:
            return self.num_issued
        return max(max(self.collectives, default=-1) + 1, self.num_issued)

    def is_done(self, position: int) -> bool:
        """Whether the collective at a position is known to have completed on this rank."""
        return position < self.num_done


GroupCalls = dict[int, RankCalls]
"""What the recorded ranks of one group issued; a rank that issued nothing is there too."""


def sort_by_group(recording: Recording) -> dict[str, GroupCalls]:
    """The calls of every group in which any recorded rank issued one."""
    calls = list_calls_by_group(recording)
    lossy = {gap.rank for gap in recording.gaps if gap.is_loss}
    lossy -= {stop.rank for stop in recording.stops if stop.is_gapless}
    stopped = {stop.rank for stop in recording.stops}
    dropped: defaultdict[tuple[str, int], list[DroppedCollectives]] = defaultdict(list)
    for record in recording.dropped:
        dropped[record.group, record.rank].append(record)
    groups: dict[str, GroupCalls] = {}
    for name, by_rank in calls.items():
        has_transfers = any(call.kind in P2P_KINDS for calls in by_rank.values() for call in calls)
        groups[name] = {}
        for rank in sorted(by_rank):
            rank_calls = _read_rank(
                by_rank[rank],
                dropped[name, rank],
                is_known=rank not in lossy and None not in lossy,
                has_transfers=has_transfers,
            )
            is_finished = rank_calls.is_known and rank not in stopped
            groups[name][rank] = replace(rank_calls, is_finished=is_finished)
    return groups


def _read_rank(
    calls: list[Collective],
    dropped: Iterable[DroppedCollectives],
    *,
    is_known: bool,
    has_transfers: bool,
) -> RankCalls:
    """Each call at its position in the group, even if calls before it are missing."""
    collectives: dict[int, IssuedCall] = {}
    transfers: list[IssuedCall] = []
    dropped_transfers, num_dropped = count_dropped(dropped)
    num_transfers = sum(dropped_transfers.values())
    position = num_dropped + num_transfers - 1
    for expected, call in enumerate(sorted(calls, key=lambda call: call.group_order), position + 1):
        position = max(position + 1, call.group_order)
        if position > expected:
            is_known = False
            if has_transfers:
                break  # missing calls may be of either kind, so later positions are unknown
        if call.kind in P2P_KINDS:
            transfers.append(call)
        else:
            collectives[position - num_transfers - len(transfers)] = call
    return RankCalls(
        collectives,
        transfers,
        is_known,
        is_known,
        num_issued=num_dropped,
        dropped=dropped_transfers,
    )


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


def line_of(call: IssuedCall | None) -> str:
    """`train.py:12`, or an empty string if the line is unknown."""
    return "" if call is None or call.source is None else f"{call.source.file}:{call.source.line}"


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-7`."""
    distinct = set(ranks)
    return f"rank{'s' if len(distinct) > 1 else ''} {list_ranks(distinct)}"


def payload_bytes(call: IssuedCall | CallSignature) -> int | None:
    """The size of the data, whether this rank sends or receives it; None if it is not recorded."""
    sizes = [size for size in (call.input_bytes, call.output_bytes) if size is not None]
    return max(sizes, default=None)


def describe_call(call: IssuedCall) -> str:
    """Kind, dtype, size, module, phase and line of a call, as text."""
    parts = [_name_kind(call), call.dtype, _describe_size(call)]
    if call.reduce_op is not None:
        parts.append(f"op {call.reduce_op}")
    if call.peer is not None:
        parts.append(f"peer {call.peer}")
    elif receives_from_any(call):
        parts.append("from any rank")
    location = _describe_location(call)
    return " ".join(part for part in parts if part) + (f" ({location})" if location else "")


def _name_kind(call: IssuedCall) -> str:
    if call.kind is not None:
        return str(call.kind)
    return call.op or "a call that is not in its dump"


def _describe_size(call: IssuedCall) -> str:
    size = payload_bytes(call)
    if size is not None:
        return f"{size:,} bytes"
    if isinstance(call, DumpedCall) and call.num_elements is not None:
        return f"{call.num_elements:,} elements"
    return ""


def _describe_location(call: IssuedCall) -> str:
    parts = []
    if not isinstance(call, DumpedCall) or call.is_located:
        parts.append(
            "outside any module" if call.owner is None else call.owner or "the root module"
        )
        if call.phase not in (None, Phase.OUTSIDE):
            parts.append(str(call.phase))
    if line := line_of(call):
        parts.append(line)
    return ", ".join(parts)


def receives_from_any(call: IssuedCall) -> bool:
    """Whether a call receives from any rank."""
    if isinstance(call, DumpedCall):
        return call.is_from_any
    return call.kind is CollectiveKind.RECV and call.peer is None


Route = tuple[int, int]
"""Of a send or receive: the sender and the receiver."""


def sort_by_route(
    group: GroupCalls,
) -> tuple[dict[Route, list[IssuedCall]], dict[Route, list[IssuedCall]], set[int]]:
    """Sends and receives by route, in order, and the ranks that receive from any rank.

    Those whose counterpart is no longer in its stream are left out.
    """
    sends: dict[Route, list[IssuedCall]] = defaultdict(list)
    receives: dict[Route, list[IssuedCall]] = defaultdict(list)
    from_anyone: set[int] = set()
    for rank, calls in group.items():
        for call in calls.transfers:
            if call.peer is None:
                from_anyone.add(rank)  # or its peer is not known
            elif call.kind == CollectiveKind.SEND:
                sends[rank, call.peer].append(call)
            else:
                receives[call.peer, rank].append(call)
        from_anyone.update(rank for _, peer in calls.dropped if peer is None)
    for route in sends.keys() | receives.keys():
        num_sent, num_received = _count_dropped_on(route, group)
        del sends[route][: max(0, num_received - num_sent)]
        del receives[route][: max(0, num_sent - num_received)]
    return sends, receives, from_anyone


def count_unlisted(route: Route, group: GroupCalls) -> int:
    """The number of transfers on a route before those that `sort_by_route` returns."""
    return max(_count_dropped_on(route, group))


def _count_dropped_on(route: Route, group: GroupCalls) -> tuple[int, int]:
    sender, receiver = route
    num_sent = group[sender].dropped.get((_K.SEND, receiver), 0) if sender in group else 0
    num_received = group[receiver].dropped.get((_K.RECV, sender), 0) if receiver in group else 0
    return num_sent, num_received


def find_unsent(group: GroupCalls) -> dict[int, IssuedCall]:
    """By rank, its first receive from any rank for which no rank of the group sent a message.

    Empty if what some rank of the group sent is not known.
    """
    transfers = [call for calls in group.values() for call in calls.transfers]
    is_known = all(calls.is_known and not calls.dropped for calls in group.values())
    if not transfers or len(group) < transfers[0].num_ranks or not is_known:
        return {}
    num_sent = Counter(call.peer for call in transfers if call.kind is CollectiveKind.SEND)
    unsent: dict[int, IssuedCall] = {}
    for rank, calls in group.items():
        receives = [call for call in calls.transfers if call.kind is CollectiveKind.RECV]
        if num_sent[rank] < len(receives) and receives_from_any(receives[num_sent[rank]]):
            unsent[rank] = receives[num_sent[rank]]
    return unsent


_K = CollectiveKind
_ROOTED = (_K.BROADCAST, _K.SCATTER, _K.REDUCE, _K.GATHER)

GroupRoute = tuple[str, int, int]
"""Of a send or receive: its group, the sender and the receiver."""


class Wait(Struct, frozen=True):
    """A collective, or a send or receive, that some ranks issued and others did not."""

    group: str
    position: int | None  # among the group's collectives; None for a send or receive
    waiters: dict[int, IssuedCall]  # the call of each waiting rank
    missing: tuple[int, ...]
    is_any: bool = False  # any of the missing ranks but the waiter ends the wait, not only all

    def blocks(self, call: IssuedCall) -> bool:
        """Whether a call of one of the waiters cannot return before the wait is over."""
        if call.group != self.group:
            return False
        if self.position is not None:
            return call.kind not in P2P_KINDS  # collectives of a group are done in order
        waiting = self.waiters[call.rank]
        return (call.kind, call.peer) == (waiting.kind, waiting.peer)


Waiting = dict[int, list[Wait]]
"""By rank, what it waits in; each leads on to the ranks that it misses."""


def returns_alone(call: IssuedCall) -> bool:
    """Whether a call may return on its rank before other ranks issue theirs."""
    if call.kind is _K.SEND or _is_async(call):
        return True
    if isinstance(call, DumpedCall) and not call.is_rooted:
        return call.kind in _ROOTED
    is_root = call.peer == call.rank
    if call.kind in (_K.BROADCAST, _K.SCATTER):
        return is_root
    return call.kind in (_K.REDUCE, _K.GATHER) and not is_root


def is_blocking_transfer(call: IssuedCall) -> bool:
    """Whether a call is `dist.send` or `dist.recv`."""
    return call.kind in P2P_KINDS and _api_of(call) in ("send", "recv")


def _is_async(call: IssuedCall) -> bool:
    return _api_of(call) in ("isend", "irecv", "batch_isend_irecv")


def _api_of(call: IssuedCall) -> str:
    if isinstance(call, DumpedCall):
        return call.api.rpartition(".")[2]
    return call.cause.api.rpartition(".")[2] if isinstance(call.cause, Call) else ""


def find_cycle(waiting: Waiting) -> list[int] | None:
    """Ranks each of which waits for the next, and the last for the first; a short cycle."""
    stuck = _find_stuck(waiting)
    if not stuck:
        return None

    def follow(rank: int) -> Iterator[int]:
        for wait in waiting[rank]:
            yield from (target for target in wait.missing if target in stuck and target != rank)

    passed: set[int] = set()
    rank = min(stuck)
    while rank not in passed:  # until a rank repeats, which is on a cycle
        passed.add(rank)
        rank = next(follow(rank))
    return _trace_cycle(rank, follow)


def _find_stuck(waiting: Waiting) -> set[int]:
    """Ranks whose waits lead into a cycle: those left when all waits that can end have ended."""
    waits = {id(wait): wait for rank_waits in waiting.values() for wait in rank_waits}
    num_missing = {key: _count_missing(wait, waiting) for key, wait in waits.items()}
    num_waits = {rank: len(rank_waits) for rank, rank_waits in waiting.items()}
    missing_in: defaultdict[int, list[int]] = defaultdict(list)
    waiters_of: defaultdict[int, list[int]] = defaultdict(list)
    for key, wait in waits.items():
        for rank in wait.missing:
            missing_in[rank].append(key)
    for rank, rank_waits in waiting.items():
        for wait in rank_waits:
            waiters_of[id(wait)].append(rank)
    ended = deque(key for key, count in num_missing.items() if not count)
    while ended:
        for rank in waiters_of[ended.popleft()]:
            num_waits[rank] -= 1
            if num_waits[rank]:
                continue
            for key in missing_in[rank]:
                num_missing[key] -= 1
                if not num_missing[key]:  # below 0 if it ended before
                    ended.append(key)
    return {rank for rank, count in num_waits.items() if count}


def _count_missing(wait: Wait, waiting: Waiting) -> int:
    """How many ranks must go on for the wait to end; ranks that do not wait go on by themselves."""
    num_waiting = sum(rank in waiting for rank in wait.missing)
    return int(num_waiting == len(wait.missing)) if wait.is_any else num_waiting


def _trace_cycle(start: int, follow: Callable[[int], Iterable[int]]) -> list[int]:
    came_from: dict[int, int] = {}
    queue = deque([start])
    while start not in came_from:
        rank = queue.popleft()
        for target in follow(rank):
            if target not in came_from:
                came_from[target] = rank
                queue.append(target)
    path = [came_from[start]]
    while path[-1] != start:
        path.append(came_from[path[-1]])
    return path[::-1]


def replay_receives(recording: Recording, groups: dict[str, GroupCalls]) -> Waiting:
    """Receives of a simulated run that would never return if only `dist.recv` blocks."""
    threads: defaultdict[tuple[int, str], deque[Collective]] = defaultdict(deque)
    from_anyone: set[int] = set()
    for call in sorted(recording.collectives, key=lambda call: call.order):
        if call.peer is None and call.kind is _K.RECV:
            from_anyone.add(call.rank)
        elif call.kind in P2P_KINDS:
            threads[call.rank, call.thread].append(call)
    num_sent: Counter[GroupRoute] = Counter()
    num_received: Counter[GroupRoute] = Counter()
    blocked: dict[GroupRoute, tuple[int, str]] = {}
    ready = deque(threads)
    while ready:
        thread = ready.popleft()
        calls = threads[thread]
        while calls:
            call = calls[0]
            route = _route_of(call)
            if call.kind is _K.SEND:
                num_sent[route] += 1
                if route in blocked:
                    ready.append(blocked.pop(route))
            else:
                is_sent = num_sent[route] > num_received[route]
                if not is_sent and _blocks(call, groups) and call.rank not in from_anyone:
                    blocked[route] = thread
                    break
                num_received[route] += 1
            calls.popleft()
    waiting: Waiting = defaultdict(list)
    for (group, sender, receiver), thread in blocked.items():
        wait = Wait(group, None, {receiver: threads[thread][0]}, (sender,))
        waiting[receiver].append(wait)
    return waiting


def _route_of(call: Collective) -> GroupRoute:
    assert call.peer is not None
    if call.kind is _K.SEND:
        return call.group, call.rank, call.peer
    return call.group, call.peer, call.rank


def _blocks(call: Collective, groups: dict[str, GroupCalls]) -> bool:
    """Whether a call is a blocking receive from a rank with a complete recording."""
    sender = groups[call.group].get(call.peer) if call.peer is not None else None
    return sender is not None and sender.is_known and _api_of(call) == "recv"
