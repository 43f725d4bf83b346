"""Ranks as threads of one process, of which one runs at a time: the one that has the baton.

It goes on where a rank has to wait for others. So nothing that ranks share in a process is used by
two at once, every run takes the same course, and a rank that waits for ever is known at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

from shardscope.errors import CollectiveError

__all__ = ["Abandoned", "Baton", "Surroundings"]


class Surroundings(Protocol):
    """What is one for the process and must be each rank's own."""

    def leave(self) -> None:
        """The rank stops running: keep what is there."""

    def enter(self) -> None:
        """The rank runs again: put back what it kept."""


class Abandoned(BaseException):
    """Another rank has failed. No Exception: a program that catches those must end all the same."""


@final
class Baton:
    """Passes from rank to rank; the first failure ends all of them."""

    def __init__(self, num_ranks: int, surroundings: Callable[[int], Surroundings]) -> None:
        self._turns = [threading.Event() for _ in range(num_ranks)]
        self._surroundings = [surroundings(rank) for rank in range(num_ranks)]
        self._ready: deque[int] = deque(range(num_ranks))
        self._waiting: dict[int, str] = {}  # for what, in words
        self._ended: set[int] = set()
        self._all_ended = threading.Event()
        self._lock = threading.Lock()
        self.results: list[Any] = [None] * num_ranks
        self.failure: tuple[int | None, BaseException] | None = None  # of which rank, if of one

    def run(self, function: Callable[[int], Any], *, poll_s: float = 0.2) -> None:
        """Run the function as each rank, until all have ended; see `results` and `failure`."""
        threads = [
            threading.Thread(target=self._live, args=(rank, function), name=f"rank {rank}")
            for rank in range(len(self._turns))
        ]
        for thread in threads:
            thread.daemon = True  # one that computes for ever must not keep the process
            thread.start()
        try:
            self._pass_on()
            while not self._all_ended.wait(poll_s):
                pass
        except BaseException as error:
            self._fail(None, error)
            self._all_ended.wait(poll_s * len(threads))
            raise
        finally:
            self._dismiss(threads, poll_s)

    def _dismiss(self, threads: Sequence[threading.Thread], patience_s: float) -> None:
        """Let the threads go one by one.

        Of two that end at once, one may hold a lock of torch's and want Python's, and the other
        have Python's and want torch's.
        """
        for rank, thread in enumerate(threads):
            self._turns[rank].set()
            thread.join(None if rank in self._ended else patience_s)

    def wait(self, rank: int, purpose: str) -> None:
        """Called by the rank that runs: let others run until someone calls `wake(rank)`."""
        self._check()
        self._waiting[rank] = purpose
        self._surroundings[rank].leave()
        self._pass_on()
        self._take_turn(rank)
        self._check()

    def wake(self, rank: int) -> None:
        """Called by the rank that runs: that one may go on when its turn comes."""
        if self._waiting.pop(rank, None) is not None:
            self._ready.append(rank)

    def _live(self, rank: int, function: Callable[[int], Any]) -> None:
        try:
            self._take_turn(rank)
            try:
                self._check()
                self.results[rank] = function(rank)
            finally:
                self._surroundings[rank].leave()
        except Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - it is raised where the ranks were begun
            self._fail(rank, error)
        finally:  # whatever happens, others must not wait for it
            self._ended.add(rank)
            self._pass_on()
            if len(self._ended) == len(self._turns):
                self._all_ended.set()
            self._turns[rank].wait()

    def _take_turn(self, rank: int) -> None:
        self._turns[rank].wait()
        self._turns[rank].clear()
        self._surroundings[rank].enter()

    def _check(self) -> None:
        if self.failure is not None:
            raise Abandoned

    def _fail(self, rank: int | None, error: BaseException) -> None:
        with self._lock:
            if self.failure is None:
                self.failure = (rank, error)
        # One after the other they take the baton, and give up.
        self._ready.extend(self._waiting)
        self._waiting.clear()

    def _pass_on(self) -> None:
        if not self._ready and self._waiting:
            self._fail(None, CollectiveError(self._describe_standstill()))
        if self._ready:
            self._turns[self._ready.popleft()].set()

    def _describe_standstill(self) -> str:
        waits = [f"rank {rank} waits in {self._waiting[rank]}" for rank in sorted(self._waiting)]
        shown = "; ".join(waits[:4]) + (" …" if len(waits) > 4 else "")
        ended = ", ".join(map(str, sorted(self._ended)))
        rest = f"; rank {ended} has ended" if ended else ""
        return (
            f"the ranks deadlock: {shown}{rest}. Let every rank of a group "
            "issue the same collectives in the same order."
        )
