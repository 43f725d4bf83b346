"""`Workers`: functions run in another process, which may crash or hang without harm.

One process serves all calls; another waits, its imports done, to take its place.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

from shardscope._torch.preloading import FOR_WORKERS
from shardscope.compile.diagnose.isolation.conversation import Limits
from shardscope.compile.diagnose.isolation.enclosure import Enclosure
from shardscope.compile.diagnose.isolation.link import Link
from shardscope.compile.diagnose.isolation.nursery import Nursery
from shardscope.compile.diagnose.isolation.payload import Payload, pack
from shardscope.errors import CompileError, WorkerCrashed, WorkerHung

__all__ = ["PREPARING", "STARTING", "Workers"]

STARTING, PREPARING = "starting", "preparing"
"""Phases of a process before it is asked anything."""

ResultT = TypeVar("ResultT")

_START_LIMIT_S = 300.0
_MAX_STARTS = 3  # of a process that does not get as far as the call


@final
@dataclass(frozen=True)
class _Preparation:
    serial: int
    payload: Payload
    limits: Limits


@final
class Workers:
    """Begins to start a process, which imports `preload` while the caller goes on.

    A standby is started when the first call is made. With a nursery, they are forks of it. What
    processes write stays in `enclosure`.
    """

    def __init__(
        self,
        enclosure: Enclosure,
        *,
        preload: Sequence[str] = FOR_WORKERS,
        has_standby: bool = True,
        nursery: Nursery | None = None,
        start_limit_s: float = _START_LIMIT_S,
    ) -> None:
        self._enclosure = enclosure
        self._preload = preload
        self._has_standby = has_standby
        self._nursery = nursery
        self._start_limit_s = start_limit_s
        self._preparations: dict[str, _Preparation] = {}
        self._serials = itertools.count()
        self._lock = threading.Lock()
        self._is_closed = False
        self.num_started = 0
        self._current: Link | None = self._start()
        self._standby: Link | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def output(self) -> str:
        """The last that the process in use printed."""
        return "" if self._current is None else self._current.output

    @property
    def pid(self) -> int | None:
        """Of the process in use, if there is one."""
        return None if self._current is None else self._current.pid

    def call(
        self, function: Callable[..., ResultT], *args: Any, limits: Limits = math.inf
    ) -> ResultT:
        """What `function(bench, *args)` returns in the worker.

        `limits` are seconds, for each phase that the function announces; "" is for all others.
        Raises RemoteError for what the function raised, WorkerCrashed and WorkerHung; after those
        two, and after an interrupt, the next call has a new process.
        """
        payload = _pack_call(function, args)
        with self._lock:
            link = self._find_ready_link()
            result: ResultT = link.ask(payload, limits=limits)
        return result

    def prepare(
        self,
        function: Callable[..., object],
        *args: Any,
        name: str = "",
        limits: Limits = math.inf,
    ) -> None:
        """Have `function(bench, *args)` run in each process before calls, as args are now.

        One of the same name takes the place of the earlier one.
        """
        payload = _pack_call(function, args).copy()
        with self._lock:
            self._preparations.pop(name, None)
            self._preparations[name] = _Preparation(next(self._serials), payload, limits)

    def forget(self, name: str) -> None:
        """Have no process do what was prepared under this name."""
        with self._lock:
            self._preparations.pop(name, None)

    def discard(self) -> None:
        """End the process in use: what it did to its device makes it of no use to the next call."""
        if self._current is not None:
            self._current.kill()
            self._current = None

    def keep_standby(self) -> None:
        """From the next call on have a process wait to take the place of one that dies."""
        self._has_standby = True

    def close(self) -> None:
        """End all processes, now."""
        self._is_closed = True
        for link in (self._current, self._standby):
            if link is not None:
                link.kill()
        self._current = self._standby = None

    def _start(self) -> Link:
        self.num_started += 1
        return Link(self._enclosure, preload=self._preload, nursery=self._nursery)

    def _find_ready_link(self) -> Link:
        """A process that has had all preparations; one that dies of them has a few successors."""
        for _ in range(_MAX_STARTS - 1):
            with contextlib.suppress(WorkerCrashed, WorkerHung):
                return self._ready_link()
        return self._ready_link()

    def _ready_link(self) -> Link:
        if self._is_closed:
            raise CompileError("the workers are closed. Make new ones.")
        link = self._current = self._living(self._current) or self._take_standby()
        link.await_ready(self._start_limit_s)
        if self._has_standby and self._living(self._standby) is None:
            self._standby = self._start()
        for preparation in self._preparations.values():
            if preparation.serial not in link.prepared:
                link.ask(preparation.payload, limits=preparation.limits, phase=PREPARING)
                link.prepared.add(preparation.serial)
        return link

    def _take_standby(self) -> Link:
        standby, self._standby = self._living(self._standby), None
        return standby or self._start()

    def _living(self, link: Link | None) -> Link | None:
        if link is None or not link.is_dead:
            return link
        link.kill()
        return None


def _pack_call(function: Callable[..., object], args: Sequence[Any]) -> Payload:
    try:
        return pack((function, args))
    except CompileError:
        raise
    except Exception as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise CompileError(
            f"a call of {name} cannot be sent to another process "
            f"({type(error).__name__}: {error}). Leave out what cannot be pickled."
        ) from error
