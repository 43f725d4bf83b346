"""One question to a worker and its answer, with a time limit for each phase of it."""

from __future__ import annotations

import math
import os
import selectors
import signal
import time
from collections.abc import Mapping
from typing import NoReturn, final

from shardscope.compile.diagnose.isolation.child import Child
from shardscope.compile.diagnose.isolation.wire import Incoming, Kind, Message
from shardscope.errors import WorkerCrashed, WorkerHung

__all__ = ["Conversation", "Limits"]

Limits = Mapping[str, float] | float

_MAX_PIECES = 64  # in one write
_MAX_WAIT_S = 3600.0  # of one look at the pipes
_TRACE_WAIT_S = 0.3  # for a hung process to print where it is
_DEATH_WAIT_S = 5.0  # between its last word and its end


@final
class Conversation:
    """Sends and listens until there is an answer, the process dies or time is up."""

    def __init__(
        self, child: Child, incoming: Incoming, *, requests: int, limits: Limits, phase: str
    ) -> None:
        self._child = child
        self._incoming = incoming
        self._requests = requests
        self._limits = limits
        self._begin(phase)

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

    def _listen(self, ears: selectors.BaseSelector, outgoing: list[memoryview]) -> Message | None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            self._hang()
        ready = {key.fd for key, _ in ears.select(min(left_s, _MAX_WAIT_S))}
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
        if message is None or message.kind is not Kind.PHASE:
            return message
        self._begin(bytes(message.pieces[0]).decode())
        return None

    def _begin(self, phase: str) -> None:
        limits = self._limits
        self._phase = phase
        self._limit_s = (
            limits.get(phase, limits.get("", math.inf)) if isinstance(limits, Mapping) else limits
        )
        self._deadline = time.monotonic() + self._limit_s

    def _crash(self) -> NoReturn:
        """It said its last word: wait for how it ended, and raise."""
        self._child.await_end(_DEATH_WAIT_S)
        self._child.kill()
        raise WorkerCrashed(self._child.end, phase=self._phase, output=self._child.output)

    def _hang(self) -> NoReturn:
        self._child.signal(signal.SIGUSR1)  # print where it is
        time.sleep(_TRACE_WAIT_S)
        self._child.kill()
        raise WorkerHung(self._limit_s, phase=self._phase, output=self._child.output)
