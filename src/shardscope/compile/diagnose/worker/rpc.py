"""One call to a worker and its reply, with a limit for each phase, over framed messages."""

from __future__ import annotations

import math
import os
import selectors
import signal
import struct
import time
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NoReturn, final

from shardscope.compile.diagnose.worker.process import Child, SessionClock
from shardscope.errors import WorkerCrashed, WorkerHung

_HEAD = struct.Struct("<BI")
_SIZE = struct.Struct("<Q")
_CHUNK_BYTES = 1 << 20


class Kind(IntEnum):
    """The kind of a message."""

    READY = 0
    CALL = 1
    PHASE = 2
    PROGRESS = 3
    VALUE = 4
    ERROR = 5


@final
class Message:
    """A kind and the message's buffers."""

    __slots__ = ("buffers", "kind")

    def __init__(self, kind: Kind, buffers: Sequence[Any] = ()) -> None:
        self.kind = kind
        self.buffers = buffers


def frame(message: Message) -> list[memoryview]:
    """The bytes of a message in the order in which they are sent; large buffers are not copied."""
    views = [memoryview(buffer).cast("B") for buffer in message.buffers]
    sizes = b"".join(_SIZE.pack(view.nbytes) for view in views)
    head = _HEAD.pack(message.kind, len(views)) + sizes
    return [memoryview(head), *(view for view in views if view.nbytes)]


@final
class Incoming:
    """Assembles messages from what a pipe delivers."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._begin()

    def read(self) -> Message | None:
        """Read once; returns a message when it is complete. Raises EOFError at the end."""
        if self._missing:
            got = os.readv(self.fd, [self._view[self._done : self._done + _CHUNK_BYTES]])
            if got == 0:
                raise EOFError
            self._done += got
        return self._advance()

    @property
    def _missing(self) -> int:
        return len(self._view) - self._done

    def _begin(self) -> None:
        self._kind: Kind | None = None
        self._sizes: list[int] | None = None
        self._buffers: list[bytearray] = []
        self._expect(_HEAD.size)

    def _expect(self, size: int) -> None:
        self._current_buffer = bytearray(size)
        self._view = memoryview(self._current_buffer)
        self._done = 0

    def _advance(self) -> Message | None:
        """Continue with the next part of the message while parts are complete."""
        while not self._missing:
            if self._kind is None:
                kind, self._num_buffers = _HEAD.unpack(self._current_buffer)
                self._kind = Kind(kind)
                self._expect(_SIZE.size * self._num_buffers)
            elif self._sizes is None:
                self._sizes = [size for (size,) in _SIZE.iter_unpack(self._current_buffer)]
                self._expect(self._sizes[0] if self._sizes else 0)
            else:
                if len(self._buffers) < len(self._sizes):
                    self._buffers.append(self._current_buffer)
                if len(self._buffers) == len(self._sizes):
                    message = Message(self._kind, self._buffers)
                    self._begin()
                    return message
                self._expect(self._sizes[len(self._buffers)])
        return None


def read_message(incoming: Incoming) -> Message | None:
    """Wait for a complete message; None at the end of the pipe."""
    while True:
        try:
            message = incoming.read()
        except EOFError:
            return None
        if message is not None:
            return message


Limits = Mapping[str, float] | float

_MAX_BUFFERS = 64  # in one write
_LOOK_S = 0.25  # between two readings of the clock
_TRACE_WAIT_S = 0.3  # for a hung process to print its stack
_DEATH_WAIT_S = 30.0  # between the end of its pipe and its own end


@final
class RpcCall:
    """Sends a request and waits for the reply, or until the process dies or makes no progress."""

    def __init__(
        self, child: Child, incoming: Incoming, *, requests: int, limits: Limits, phase: str
    ) -> None:
        self._child = child
        self._incoming = incoming
        self._requests = requests
        self._watchdog = _Watchdog(child, limits)
        self._watchdog.begin(phase)

    def run(self, outgoing: list[memoryview]) -> Message:
        """The reply. Raises WorkerCrashed or WorkerHung; the caller then kills the process."""
        with selectors.DefaultSelector() as selector:
            for fd in (self._incoming.fd, self._child.output_fd, self._child.death_fd):
                if fd is not None:
                    selector.register(fd, selectors.EVENT_READ)
            if outgoing:
                selector.register(self._requests, selectors.EVENT_WRITE)
            while True:
                answer = self._poll_once(selector, outgoing)
                if answer is not None:
                    self._child.read_output()
                    return answer
                if self._watchdog.is_hung():
                    self._hang()

    def _poll_once(
        self, selector: selectors.BaseSelector, outgoing: list[memoryview]
    ) -> Message | None:
        ready = {key.fd for key, _ in selector.select(self._watchdog.look_s)}
        if self._child.output_fd in ready and not self._child.read_output():
            selector.unregister(self._child.output_fd)  # all writers have closed it
        if self._requests in ready and not self._send(outgoing):
            selector.unregister(self._requests)
        if self._incoming.fd in ready:
            return self._receive()
        if self._child.death_fd in ready:
            self._crash()
        return None

    def _send(self, outgoing: list[memoryview]) -> bool:
        """Write as much as the pipe accepts; returns whether there is more."""
        try:
            written = os.writev(self._requests, outgoing[:_MAX_BUFFERS])
        except BlockingIOError:
            return True
        except BrokenPipeError:  # it died; reading the replies will show how
            return False
        while outgoing and written >= outgoing[0].nbytes:
            written -= outgoing.pop(0).nbytes
        if outgoing:
            outgoing[0] = outgoing[0][written:]
        return bool(outgoing)

    def _receive(self) -> Message | None:
        try:
            message = self._incoming.read()
        except EOFError:
            self._crash()
        if message is not None and message.kind is Kind.PHASE:
            self._watchdog.begin(bytes(message.buffers[0]).decode())
            return None
        if message is not None and message.kind is Kind.PROGRESS:
            self._watchdog.see_progress()
            return None
        return message

    def _crash(self) -> NoReturn:
        """The pipe is closed: wait for the end of the process, and raise."""
        self._child.await_end(_DEATH_WAIT_S)
        self._child.kill()
        raise WorkerCrashed(self._child.end, phase=self._watchdog.phase, output=self._child.output)

    def _hang(self) -> NoReturn:
        self._child.signal(signal.SIGUSR1)  # print its stack
        time.sleep(_TRACE_WAIT_S)
        self._child.kill()
        raise WorkerHung(
            self._watchdog.limit_s, phase=self._watchdog.phase, output=self._child.output
        )


@final
class _Watchdog:
    """Tracks the phase of a process, and when it last made progress.

    Progress is a new phase, a new child process, or code that was not executed before in this
    phase. A phase with a short limit may continue while there is progress, up to the longest limit
    of all phases.
    """

    def __init__(self, child: Child, limits: Limits) -> None:
        self._child = child
        self._limits = limits
        self._longest_s = max(limits.values()) if isinstance(limits, Mapping) else limits
        self._clock = SessionClock(-1)
        self._num_processes = 0
        self._looked = time.monotonic()

    def begin(self, phase: str) -> None:
        """Begin a phase."""
        limits = self._limits
        self.phase = phase
        self.limit_s = (
            limits.get(phase, limits.get("", math.inf)) if isinstance(limits, Mapping) else limits
        )
        self.look_s = min(_LOOK_S, self.limit_s / 4)
        self._phase_start_s = self._progress_s = self._clock.seconds

    def see_progress(self) -> None:
        """Record progress in this phase."""
        self._progress_s = self._clock.seconds

    def is_hung(self) -> bool:
        """Whether it has made no progress for too long; reads the clock at intervals."""
        now = time.monotonic()
        if now - self._looked < self.look_s:
            return False
        self._looked = now
        self._clock.session = self._child.pid or -1  # it has no pid before it is forked
        seconds = self._clock.look()
        if len(self._clock.processes) > self._num_processes:
            self._num_processes = len(self._clock.processes)
            self._progress_s = seconds
        longest_s = max(self._longest_s, self.limit_s)
        return (
            seconds - self._progress_s > self.limit_s or seconds - self._phase_start_s > longest_s
        )
