"""Ranks in lockstep: none issues a collective before all ranks of its group have come to it.

Each rank's process reports a collective to a coordinator before it is issued, and goes on when
the coordinator has received the same from the other ranks of the group. So ranks that disagree, or
that wait for each other, are known at once, and nothing hangs: the coordinator ends all of them.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

import msgspec
from msgspec import Struct

from shardscope.hang import P2P_KINDS, differ
from shardscope.launch.decisions import Exchange, find_excess
from shardscope.record import Collective, CollectiveKind

OUTCOME = "lockstep.json"
"""The file, in the scratch folder, with the outcome."""
_GO, _STOP = b"g", b"s"
_MAX_MESSAGE = 1 << 18
_MAIN = ""  # the name of the main thread in records


class Joined(Struct, frozen=True, tag=True):
    """The first message of a thread of a rank."""

    rank: int
    thread: str


class Members(Struct, frozen=True, tag=True):
    """The ranks of a group, reported before its first collective."""

    group: str
    ranks: tuple[int, ...]


class Arrival(Struct, frozen=True, tag=True):
    """A rank is about to issue a collective; `waits` if its call returns only when it is done.

    `exchange` is that of an all-to-all.
    """

    call: Collective
    waits: bool
    tag: int = 0
    exchange: Exchange | None = None


class Waiting(Struct, frozen=True, tag=True):
    """A rank waits for a send or receive that it has issued before, without waiting then."""

    order: int


class StepEnded(Struct, frozen=True, tag=True):
    """A rank has taken a training step, and dispatched so many ops since its start."""

    step: int  # counted from 1
    num_ops: int


class Left(Struct, frozen=True, tag=True):
    """The program of a rank has ended; `failure` is the exception that ended it, if any.

    `is_cut` means that it was asked to end, so that nothing is known of what it would have issued.
    """

    failure: str | None
    is_cut: bool = False


Message = Joined | Members | Arrival | Waiting | StepEnded | Left
_MIN_STEPS, _MAX_OPS = 3, 20_000
_LARGE_STEPS = 2  # of a program that dispatches as many ops in a step


def has_run_enough(step: int, num_ops: int, max_ops: int = _MAX_OPS) -> bool:
    """Whether a program that has taken `step` steps, with so many ops in all, is to be ended."""
    is_large = num_ops >= max_ops * step
    return num_ops >= max_ops and step >= (_LARGE_STEPS if is_large else _MIN_STEPS)


class Outcome(Struct, frozen=True):
    """How ranks in lockstep have ended.

    `reason` is "completed" if all ranks have ended by themselves, "mismatch" if ranks of a group
    came to different collectives, "stuck" if all wait for each other or for ranks that have ended,
    "failed" if the program of a rank has raised an exception.
    """

    reason: str
    ranks: tuple[int, ...] = ()  # that failed, or that wait
    failure: str | None = None


@final
class Lockstep:
    """The side of a rank: reports collectives, and waits for the coordinator's answer."""

    def __init__(self, address: str, rank: int) -> None:
        self._address = address
        self._rank = rank
        self._connections = threading.local()
        self._owner = os.getpid()

    def report_members(self, group: str, ranks: tuple[int, ...]) -> None:
        """Name the ranks of a group, before its first collective."""
        self._send(Members(group, ranks))

    def arrive(self, arrival: Arrival) -> bool:
        """Report a collective; False if the rank must end, because ranks have diverged."""
        return self._ask(arrival)

    def wait(self, order: int) -> bool:
        """Wait for the send or receive that was reported as this rank's collective `order`."""
        return self._ask(Waiting(order))

    def end_step(self, step: int, num_ops: int) -> bool:
        """Report the end of a step; False if the program has taken enough, on all ranks."""
        return self._ask(StepEnded(step, num_ops))

    def leave(self, failure: str | None, *, is_cut: bool) -> None:
        """Report that the program has ended, perhaps because it was asked to."""
        self._send(Left(failure, is_cut)).close()
        del self._connections.socket

    def _ask(self, message: Message) -> bool:
        if os.getpid() != self._owner:  # a process that the rank has forked
            return True
        connection = self._send(message)
        try:
            return connection.recv(1) == _GO
        except OSError:
            return False

    def _send(self, message: Message) -> socket.socket:
        connection: socket.socket | None = getattr(self._connections, "socket", None)
        if connection is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.connect(self._address)
            self._connections.socket = connection
            is_main = threading.current_thread() is threading.main_thread()
            thread = _MAIN if is_main else threading.current_thread().name
            connection.sendall(msgspec.msgpack.encode(Joined(self._rank, thread)))
        with suppress(OSError):  # if the coordinator has ended, everything else ends too
            connection.sendall(msgspec.msgpack.encode(message))
        return connection


@final
class _Thread:
    """A connected thread of a rank; `waits_in` is the collective that it waits in, if it does."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.rank = -1
        self.name = _MAIN
        self.waits_in: Collective | None = None

    def answer(self, answer: bytes) -> None:
        """Let the thread go on, or end."""
        self.waits_in = None
        with suppress(OSError):  # if the process has died
            self.connection.sendall(answer)


@final
class Coordinator:
    """Compares what ranks report, and decides when they go on.

    Runs in a process of its own until all ranks have ended. `ranks` are those that take part.
    `ends` is a pipe that names each rank whose process has ended; when it is closed, all have.
    """

    def __init__(self, address: str, ranks: Iterable[int], outcome: Path, ends: int) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(address)
        self._listener.listen(1024)
        self._path = outcome
        self._ends = ends
        self._running = set(ranks)
        self._threads: dict[int, _Thread] = {}  # by file descriptor
        self._members: dict[str, tuple[int, ...]] = {}
        self._arrivals: dict[tuple[str, int], dict[int, Arrival]] = defaultdict(dict)
        self._counts: dict[tuple[str, int], int] = defaultdict(int)
        self._waiting: dict[tuple[str, int], list[_Thread]] = defaultdict(list)
        self._transfers = _Transfers()
        self._outcome: Outcome | None = None
        self._mismatched: set[int] = set()  # ranks that came to different collectives
        self._is_cut = False  # whether a rank was asked to end
        self._last_step: int | None = None  # after which all are asked to
        self._num_steps = 0  # that any rank has taken
        self._selector = selectors.DefaultSelector()

    def close(self) -> None:
        """Close the socket in a process that does not coordinate."""
        self._listener.close()

    def run(self) -> None:
        """Answer until all ranks have ended, then write the outcome."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._ends, selectors.EVENT_READ)
        while self._running:
            ready = {key.fd for key, _ in self._selector.select()}
            if self._listener.fileno() in ready:
                self._accept()
            for thread in [self._threads[fd] for fd in ready if fd in self._threads]:
                self._receive(thread)
            if ready == {self._ends} and not self._read_end():
                break
        outcome = self._outcome or Outcome("completed")
        self._path.write_bytes(msgspec.json.encode(outcome))
        for thread in self._threads.values():
            thread.connection.close()
        self._selector.close()
        self._listener.close()

    def _read_end(self) -> bool:
        """Note a rank whose process has ended; False if all have."""
        data = os.read(self._ends, 4)
        if data:
            rank = int.from_bytes(data, "little")
            if rank in self._running:
                self._leave(rank, "its process died")
        return bool(data)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        self._threads[connection.fileno()] = _Thread(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, thread: _Thread) -> None:
        try:
            data = thread.connection.recv(_MAX_MESSAGE)
        except OSError:
            data = b""
        if not data:
            self._disconnect(thread)
            return
        match msgspec.msgpack.decode(data, type=Message):
            case Joined(rank, name):
                thread.rank, thread.name = rank, name
            case Members(group, ranks):
                self._members.setdefault(group, ranks)
            case Arrival() as arrival:
                self._arrive(thread, arrival)
            case Waiting(order):
                self._wait_for_transfer(thread, order)
            case StepEnded(step, num_ops):
                self._end_step(thread, step, num_ops)
            case Left(failure, is_cut):
                self._is_cut |= is_cut
                self._leave(thread.rank, failure)

    def _disconnect(self, thread: _Thread) -> None:
        self._selector.unregister(thread.connection)
        del self._threads[thread.connection.fileno()]
        thread.connection.close()
        if thread.name == _MAIN and thread.rank in self._running:
            self._leave(thread.rank, "its process died")

    def _leave(self, rank: int, failure: str | None) -> None:
        self._running.discard(rank)
        if failure is not None:
            self._stop(Outcome("failed", (rank,), failure))
        self._check_progress()

    def _end_step(self, thread: _Thread, step: int, num_ops: int) -> None:
        """The first rank to end a step decides whether it is the last, so that all take as many."""
        if step > self._num_steps:
            self._num_steps = step
            if has_run_enough(step, num_ops) and self._last_step is None:
                self._last_step = step
        is_last = self._last_step is not None and step >= self._last_step
        thread.answer(_STOP if is_last or self._outcome is not None else _GO)

    def _arrive(self, thread: _Thread, arrival: Arrival) -> None:
        call = arrival.call
        if self._outcome is not None:
            thread.answer(_STOP)
        elif call.kind in P2P_KINDS:
            self._transfer(thread, arrival)
        else:
            self._join(thread, arrival)

    def _join(self, thread: _Thread, arrival: Arrival) -> None:
        """Take part in a collective; the last rank to come lets all go on."""
        call = arrival.call
        members = self._members.get(call.group, (call.rank,))
        key = (call.group, self._counts[call.group, call.rank])
        self._counts[call.group, call.rank] += 1
        arrivals = self._arrivals[key]
        thread.waits_in = call
        if any(_contradict(arrival, other, members) for other in arrivals.values()):
            # All wait now, or will: the outcome is known when no rank can go on.
            self._mismatched |= {*arrivals, call.rank}
            self._waiting[key].append(thread)
            self._check_progress()
            return
        arrivals[call.rank] = arrival
        if len(arrivals) == len(members):
            for waiting in (*self._waiting.pop(key, ()), thread):
                waiting.answer(_GO)
            del self._arrivals[key]
        elif not arrival.waits:
            thread.answer(_GO)
        else:
            self._waiting[key].append(thread)
            self._check_progress()

    def _transfer(self, thread: _Thread, arrival: Arrival) -> None:
        """Post a send or a receive; it is done when its counterpart is posted, too."""
        call = arrival.call
        for waiting in self._transfers.post(call, arrival.tag):
            waiting.answer(_GO)
        if arrival.waits:
            self._wait_for_transfer(thread, call.order)
        else:
            thread.answer(_GO)

    def _wait_for_transfer(self, thread: _Thread, order: int) -> None:
        call = self._transfers.find(thread.rank, order)
        if self._outcome is not None:
            thread.answer(_STOP)
        elif call is None:
            thread.answer(_GO)
        else:
            self._transfers.wait(thread, call)
            thread.waits_in = call
            self._check_progress()

    def _check_progress(self) -> None:
        """End all ranks if none can go on."""
        by_rank: dict[int, list[_Thread]] = defaultdict(list)
        for thread in self._threads.values():
            by_rank[thread.rank].append(thread)
        is_stuck = self._running and all(
            by_rank[rank] and all(thread.waits_in for thread in by_rank[rank])
            for rank in self._running
        )
        if is_stuck and self._mismatched:
            self._stop(Outcome("mismatch", tuple(sorted(self._mismatched))))
        elif is_stuck:
            reason = "completed" if self._is_cut else "stuck"
            self._stop(Outcome(reason, tuple(sorted(self._running))))

    def _stop(self, outcome: Outcome) -> None:
        """End all ranks: those that wait now, others at their next collective."""
        if self._outcome is None:
            self._outcome = outcome
        for thread in self._threads.values():
            if thread.waits_in is not None:
                thread.answer(_STOP)


def _contradict(first: Arrival, second: Arrival, members: Sequence[int]) -> bool:
    """Whether two ranks of a group do not issue the same collective, or expect other sizes."""
    if differ(first.call, second.call):
        return True
    if first.exchange is None or second.exchange is None:
        return False
    ranks = first.call.rank, second.call.rank
    return find_excess(first.exchange, second.exchange, ranks, members) is not None


@final
class _Transfers:
    """Sends and receives that have not met yet, as posted."""

    def __init__(self) -> None:
        self._posted: list[tuple[Collective, int]] = []  # with their tags
        self._waiting: list[tuple[_Thread, Collective]] = []

    def post(self, call: Collective, tag: int) -> list[_Thread]:
        """Post a send or receive; returns the threads that wait for its counterpart."""
        counterpart = next((p for p in self._posted if _meet(p, (call, tag))), None)
        if counterpart is None:
            self._posted.append((call, tag))
            return []
        self._posted.remove(counterpart)
        ready = [thread for thread, waited in self._waiting if waited is counterpart[0]]
        self._waiting = [pair for pair in self._waiting if pair[1] is not counterpart[0]]
        return ready

    def find(self, rank: int, order: int) -> Collective | None:
        """A send or receive that was posted and has met no counterpart."""
        calls = (call for call, _ in self._posted)
        return next((call for call in calls if (call.rank, call.order) == (rank, order)), None)

    def wait(self, thread: _Thread, call: Collective) -> None:
        """A thread waits for the counterpart of what was posted."""
        self._waiting.append((thread, call))


def _meet(first: tuple[Collective, int], second: tuple[Collective, int]) -> bool:
    """Whether one is a send and the other the receive that takes its message."""
    (a, tag), (b, other_tag) = first, second
    if a.kind is b.kind or a.group != b.group or tag != other_tag:
        return False
    send, receive = (a, b) if a.kind is CollectiveKind.SEND else (b, a)
    return send.peer == receive.rank and receive.peer in (None, send.rank)
