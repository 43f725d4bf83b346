"""`Workers`: runs functions in another process, which may crash or hang safely."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

from shardscope._torch.preload import FOR_WORKERS
from shardscope.compile.diagnose.worker.fork_server import ForkServer
from shardscope.compile.diagnose.worker.process import Child, spawn
from shardscope.compile.diagnose.worker.rpc import Incoming, Kind, Limits, Message, RpcCall, frame
from shardscope.compile.diagnose.worker.sandbox import Sandbox
from shardscope.compile.diagnose.worker.serialization import Payload, pack, unpack
from shardscope.errors import CompileError, RemoteError, WorkerCrashed, WorkerHung

# Not `-m`: the worker uses the `sys.path` of this process.
_START = """
import json, sys
arguments = json.loads(sys.argv[1])
sys.path[:] = arguments.pop("path")
from shardscope.compile.diagnose.worker.server import serve
serve(int(sys.argv[2]), int(sys.argv[3]), **arguments)
"""


@final
class WorkerHandle:
    """Starts a worker process without waiting for it, and sends it calls."""

    def __init__(
        self, sandbox: Sandbox, *, preload: Sequence[str], fork_server: ForkServer | None = None
    ) -> None:
        child_in, self._requests = os.pipe()
        replies, child_out = os.pipe()
        for fd in (self._requests, replies):
            os.set_blocking(fd, False)
        self._close = weakref.finalize(self, _close, self._requests, replies)
        try:
            self._child = _start((child_in, child_out), sandbox, preload, fork_server)
        except BaseException:
            self._close()
            raise
        finally:
            _close(child_in, child_out)
        self._incoming = Incoming(replies)
        self._is_ready = False
        self.prepared: set[int] = set()  # serial numbers of the preparations that it has run

    @property
    def pid(self) -> int | None:
        """Process id; None before the process has started."""
        return self._child.pid

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended."""
        return self._child.is_dead

    @property
    def output(self) -> str:
        """The last output that was read from it."""
        return self._child.output

    def await_ready(self, limit_s: float) -> None:
        """Wait until it has imported its modules."""
        if not self._is_ready:
            self._exchange([], limits=limit_s, phase="starting")
            self._is_ready = True

    def ask(self, payload: Payload, *, limits: Limits, phase: str = "") -> Any:
        """Call a function in the worker; returns its result or raises RemoteError."""
        buffers = [json.dumps(_absolute_path()).encode(), *payload.buffers]
        answer = self._exchange(frame(Message(Kind.CALL, buffers)), limits=limits, phase=phase)
        value = unpack(answer.buffers)
        if answer.kind is Kind.ERROR:
            raise _remote_error(*value, phase=phase)
        return value

    def kill(self) -> None:
        """Kill the process and its children."""
        self._child.kill()
        self._close()

    def _exchange(self, outgoing: list[memoryview], *, limits: Limits, phase: str) -> Message:
        """Send a request and wait for the reply; any exception, or an interrupt, kills the
        process.
        """
        try:
            rpc_call = RpcCall(
                self._child, self._incoming, requests=self._requests, limits=limits, phase=phase
            )
            return rpc_call.run(outgoing)
        except BaseException:
            self.kill()
            raise


def _start(
    fds: tuple[int, int], sandbox: Sandbox, preload: Sequence[str], fork_server: ForkServer | None
) -> Child:
    arguments: dict[str, Any] = {"path": _absolute_path(), "preload": list(preload)}
    if fork_server is not None:
        arguments |= {"parent": fork_server.pid, "is_tied": True}
        return fork_server.fork(_START, json.dumps(arguments), pass_fds=fds)
    is_tied = threading.current_thread() is threading.main_thread()
    arguments |= {"parent": os.getpid(), "is_tied": is_tied}
    return spawn(
        [sys.executable, "-c", _START, json.dumps(arguments), *map(str, fds)],
        environment=sandbox.environment(),
        folder=sandbox.work,
        pass_fds=fds,
    )


def _absolute_path() -> list[str]:
    """`sys.path` with absolute paths, because the worker runs in another folder."""
    return [os.path.abspath(path) for path in sys.path]


def _remote_error(kind: str, message: str, trace: str, itself: bytes, *, phase: str) -> RemoteError:
    error = RemoteError(kind, message, trace=trace, phase=phase)
    with contextlib.suppress(Exception):  # its type may exist in the worker only
        cause = unpack(pickle.loads(itself))
        error.__cause__ = cause if isinstance(cause, BaseException) else None
    return error


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


STARTING, PREPARING = "starting", "preparing"
"""Phases of a process before it is asked anything."""

ResultT = TypeVar("ResultT")

_START_LIMIT_S = 300.0
_MAX_STARTS = 3  # of a process that dies before the call


@final
@dataclass(frozen=True)
class _Preparation:
    serial: int
    payload: Payload
    limits: Limits


@final
class Workers:
    """Starts a worker process, which imports `preload` while the caller continues.

    A standby is started with the first call. With a fork server, workers are its forks. Their files
    stay in `sandbox`.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        preload: Sequence[str] = FOR_WORKERS,
        has_standby: bool = True,
        fork_server: ForkServer | None = None,
        start_limit_s: float = _START_LIMIT_S,
    ) -> None:
        self._sandbox = sandbox
        self._preload = preload
        self._has_standby = has_standby
        self._fork_server = fork_server
        self._start_limit_s = start_limit_s
        self._preparations: dict[str, _Preparation] = {}
        self._serials = itertools.count()
        self._lock = threading.Lock()
        self._is_closed = False
        self.num_started = 0
        self._current: WorkerHandle | None = self._start()
        self._standby: WorkerHandle | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def output(self) -> str:
        """The last output of the process in use."""
        return "" if self._current is None else self._current.output

    @property
    def pid(self) -> int | None:
        """Process id of the process in use; None if there is none."""
        return None if self._current is None else self._current.pid

    def call(
        self, function: Callable[..., ResultT], *args: Any, limits: Limits = math.inf
    ) -> ResultT:
        """The result of `function(context, *args)` in the worker.

        `limits` are seconds for each phase that the function reports; "" applies to all others.
        Raises RemoteError if the function raises, WorkerCrashed and WorkerHung; after these two,
        and after an interrupt, the next call gets a new process.
        """
        payload = _pack_call(function, args)
        with self._lock:
            worker = self._find_ready_worker()
            result: ResultT = worker.ask(payload, limits=limits)
        return result

    def prepare(
        self,
        function: Callable[..., object],
        *args: Any,
        name: str = "",
        limits: Limits = math.inf,
    ) -> None:
        """Run `function(context, *args)` in each process before calls; args are copied now.

        A preparation of the same name replaces the earlier one.
        """
        payload = _pack_call(function, args).copy()
        with self._lock:
            self._preparations.pop(name, None)
            self._preparations[name] = _Preparation(next(self._serials), payload, limits)

    def forget(self, name: str) -> None:
        """Remove the preparation of this name."""
        with self._lock:
            self._preparations.pop(name, None)

    def discard(self) -> None:
        """Kill the process in use, because its device is no longer usable."""
        if self._current is not None:
            self._current.kill()
            self._current = None

    def keep_standby(self) -> None:
        """From the next call on, start a standby process that replaces a worker that dies."""
        self._has_standby = True

    def close(self) -> None:
        """Kill all processes immediately."""
        self._is_closed = True
        for worker in (self._current, self._standby):
            if worker is not None:
                worker.kill()
        self._current = self._standby = None

    def _start(self) -> WorkerHandle:
        self.num_started += 1
        return WorkerHandle(self._sandbox, preload=self._preload, fork_server=self._fork_server)

    def _find_ready_worker(self) -> WorkerHandle:
        """A process that has run all preparations; if it dies of them, a few more are started."""
        for _ in range(_MAX_STARTS - 1):
            with contextlib.suppress(WorkerCrashed, WorkerHung):
                return self._ready_worker()
        return self._ready_worker()

    def _ready_worker(self) -> WorkerHandle:
        if self._is_closed:
            raise CompileError("the workers are closed. Make new ones.")
        worker = self._current = self._living(self._current) or self._take_standby()
        worker.await_ready(self._start_limit_s)
        if self._has_standby and self._living(self._standby) is None:
            self._standby = self._start()
        for preparation in self._preparations.values():
            if preparation.serial not in worker.prepared:
                worker.ask(preparation.payload, limits=preparation.limits, phase=PREPARING)
                worker.prepared.add(preparation.serial)
        return worker

    def _take_standby(self) -> WorkerHandle:
        standby, self._standby = self._living(self._standby), None
        return standby or self._start()

    def _living(self, worker: WorkerHandle | None) -> WorkerHandle | None:
        if worker is None or not worker.is_dead:
            return worker
        worker.kill()
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
