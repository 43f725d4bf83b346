"""Waits between ranks: cycles of waits, and receives that would block each other."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct

from shardscope.comm.group_order import P2P_KINDS, GroupCalls
from shardscope.record.kinds import CollectiveKind
from shardscope.record.recording import Call, Collective, Recording

_K = CollectiveKind

Route = tuple[str, int, int]
"""Of a send or receive: its group, the sender and the receiver."""


class Wait(Struct, frozen=True):
    """A collective, or a send or receive, that some ranks issued and others did not."""

    group: str
    position: int | None  # among the group's collectives; None for a send or receive
    waiters: dict[int, Collective]  # the call of each waiting rank
    missing: tuple[int, ...]
    is_any: bool = False  # any of the missing ranks but the waiter ends the wait, not only all

    def blocks(self, call: Collective) -> bool:
        """Whether a call of one of the waiters cannot return before the wait is over."""
        if call.group != self.group:
            return False
        if self.position is not None:
            return call.kind not in P2P_KINDS  # collectives of a group are done in order
        waiting = self.waiters[call.rank]
        return (call.kind, call.peer) == (waiting.kind, waiting.peer)


Waiting = dict[int, list[Wait]]
"""By rank, what it waits in; each leads on to the ranks that it misses."""


def returns_alone(call: Collective) -> bool:
    """Whether a call may return on its rank before other ranks issue theirs."""
    if call.kind is _K.SEND or _is_async(call):
        return True
    is_root = call.peer == call.rank
    if call.kind in (_K.BROADCAST, _K.SCATTER):
        return is_root
    return call.kind in (_K.REDUCE, _K.GATHER) and not is_root


def is_blocking_transfer(call: Collective) -> bool:
    """Whether a call is `dist.send` or `dist.recv`."""
    return call.kind in P2P_KINDS and _api_of(call) in ("send", "recv")


def _is_async(call: Collective) -> bool:
    return _api_of(call) in ("isend", "irecv", "batch_isend_irecv")


def _api_of(call: Collective) -> str:
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
    num_sent: Counter[Route] = Counter()
    num_received: Counter[Route] = Counter()
    blocked: dict[Route, tuple[int, str]] = {}
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


def _route_of(call: Collective) -> Route:
    assert call.peer is not None
    if call.kind is _K.SEND:
        return call.group, call.rank, call.peer
    return call.group, call.peer, call.rank


def _blocks(call: Collective, groups: dict[str, GroupCalls]) -> bool:
    """Whether a call is a blocking receive from a rank with a complete recording."""
    sender = groups[call.group].get(call.peer) if call.peer is not None else None
    return sender is not None and sender.is_known and _api_of(call) == "recv"
