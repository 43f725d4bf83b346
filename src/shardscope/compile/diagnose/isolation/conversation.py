"""One question to a worker and its answer, with a limit for each phase of it.

Limits are seconds without progress, counted by a `SessionClock`: a busy machine ends nothing.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import time
from collections.abc import Mapping
from typing import NoReturn, final

from shardscope.compile.diagnose.isolation.child import Child
from shardscope.compile.diagnose.isolation.session_clock import SessionClock
from shardscope.compile.diagnose.isolation.wire import Incoming, Kind, Message
from shardscope.errors import WorkerCrashed, WorkerHung

__all__ = ["Conversation", "Limits"]

Limits = Mapping[str, float] | float

_MAX_PIECES = 64  # in one write
_LOOK_S = 0.25  # between two looks at the clock
_TRACE_WAIT_S = 0.3  # for a hung process to print where it is
_DEATH_WAIT_S = 30.0  # between its last word and its end


@final
class Conversation:
    """Sends and listens until there is an answer, the process dies or makes no progress."""

    def __init__(
        self, child: Child, incoming: Incoming, *, requests: int, limits: Limits, phase: str
    ) -> None:
        self._child = child
        self._incoming = incoming
        self._requests = requests
        self._watchdog = _Watchdog(child, limits)
        self._watchdog.begin(phase)

    def run(self, outgoing: list[memoryview]) -> Message:
        """Raises WorkerCrashed or WorkerHung; the process is then for the caller to end."""
        with selectors.DefaultSelector() as ears:
            for fd in (self._incoming.fd, self._child.output_fd, self._child.death_fd):
                if fd is not None:
                    ears.register(fd, selectors.EVENT_READ)
            if outgoing:
                ears.register(self._requests, selectors.EVENT_WRITE)
            while True:
                answer = self._listen(ears, outgoing)
                if answer is not None:
                    self._child.keep_output()
                    return answer
                if self._watchdog.is_hung():
                    self._hang()

    def _listen(self, ears: selectors.BaseSelector, outgoing: list[memoryview]) -> Message | None:
        ready = {key.fd for key, _ in ears.select(self._watchdog.look_s)}
        if self._child.output_fd in ready and not self._child.keep_output():
            ears.unregister(self._child.output_fd)  # nobody is left who could print
        if self._requests in ready and not self._send(outgoing):
            ears.unregister(self._requests)
        if self._incoming.fd in ready:
            return self._receive()
        if self._child.death_fd in ready:
            self._crash()
        return None

    def _send(self, outgoing: list[memoryview]) -> bool:
        """Write what the pipe takes; whether there is more."""
        try:
            written = os.writev(self._requests, outgoing[:_MAX_PIECES])
        except BlockingIOError:
            return True
        except BrokenPipeError:  # it died; listening tells how
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
            self._watchdog.begin(bytes(message.pieces[0]).decode())
            return None
        if message is not None and message.kind is Kind.PROGRESS:
            self._watchdog.see_progress()
            return None
        return message

    def _crash(self) -> NoReturn:
        """It said its last word: wait for how it ended, and raise."""
        self._child.await_end(_DEATH_WAIT_S)
        self._child.kill()
        raise WorkerCrashed(self._child.end, phase=self._watchdog.phase, output=self._child.output)

    def _hang(self) -> NoReturn:
        self._child.signal(signal.SIGUSR1)  # print where it is
        time.sleep(_TRACE_WAIT_S)
        self._child.kill()
        raise WorkerHung(
            self._watchdog.limit_s, phase=self._watchdog.phase, output=self._child.output
        )


@final
class _Watchdog:
    """Knows the phase that a process is in, and when it last made progress.

    Progress is a new phase, a process that it begins, or code that it has not been seen in during
    the phase. A phase whose limit is short may go on as long as there is some, up to the longest
    limit of all.
    """

    def __init__(self, child: Child, limits: Limits) -> None:
        self._child = child
        self._limits = limits
        self._longest_s = max(limits.values()) if isinstance(limits, Mapping) else limits
        self._clock = SessionClock(-1)
        self._num_processes = 0
        self._looked = time.monotonic()

    def begin(self, phase: str) -> None:
        """A phase begins."""
        limits = self._limits
        self.phase = phase
        self.limit_s = (
            limits.get(phase, limits.get("", math.inf)) if isinstance(limits, Mapping) else limits
        )
        self.look_s = min(_LOOK_S, self.limit_s / 4)
        self._begun_s = self._progress_s = self._clock.seconds

    def see_progress(self) -> None:
        """Something happened that has not happened before in this phase."""
        self._progress_s = self._clock.seconds

    def is_hung(self) -> bool:
        """Whether it has made no progress for too long; looks at the clock now and then."""
        now = time.monotonic()
        if now - self._looked < self.look_s:
            return False
        self._looked = now
        self._clock.session = self._child.pid or -1  # before it is forked it has none
        seconds = self._clock.look()
        if len(self._clock.processes) > self._num_processes:
            self._num_processes = len(self._clock.processes)
            self._progress_s = seconds
        longest_s = max(self._longest_s, self.limit_s)
        return seconds - self._progress_s > self.limit_s or seconds - self._begun_s > longest_s
