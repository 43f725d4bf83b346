"""One worker process as its owner sees it: calls go out, answers come back."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any, final

from shardscope.compile.diagnose.isolation.child import Child, spawn
from shardscope.compile.diagnose.isolation.conversation import Conversation, Limits
from shardscope.compile.diagnose.isolation.enclosure import Enclosure
from shardscope.compile.diagnose.isolation.nursery import Nursery
from shardscope.compile.diagnose.isolation.payload import Payload, unpack
from shardscope.compile.diagnose.isolation.wire import Incoming, Kind, Message, frame
from shardscope.errors import RemoteError

__all__ = ["Link"]

# Not `-m`: the worker looks for modules where this process does, ours included.
_START = """
import json, sys
told = json.loads(sys.argv[1])
sys.path[:] = told.pop("path")
from shardscope.compile.diagnose.isolation.main import serve
serve(int(sys.argv[2]), int(sys.argv[3]), **told)
"""


@final
class Link:
    """Starts a worker and does not wait for it."""

    def __init__(
        self, enclosure: Enclosure, *, preload: Sequence[str], nursery: Nursery | None = None
    ) -> None:
        theirs_in, self._requests = os.pipe()
        replies, theirs_out = os.pipe()
        for fd in (self._requests, replies):
            os.set_blocking(fd, False)
        self._close = weakref.finalize(self, _close, self._requests, replies)
        try:
            self._child = _start((theirs_in, theirs_out), enclosure, preload, nursery)
        except BaseException:
            self._close()
            raise
        finally:
            _close(theirs_in, theirs_out)
        self._incoming = Incoming(replies)
        self._is_ready = False
        self.prepared: set[int] = set()  # serial numbers of the preparations that it has had

    @property
    def pid(self) -> int | None:
        """Of the process; None before it has begun."""
        return self._child.pid

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended."""
        return self._child.is_dead

    @property
    def output(self) -> str:
        """The last that it printed, as far as it was read."""
        return self._child.output

    def await_ready(self, limit_s: float) -> None:
        """Until it has imported all that it needs."""
        if not self._is_ready:
            self._converse([], limits=limit_s, phase="starting")
            self._is_ready = True

    def ask(self, payload: Payload, *, limits: Limits, phase: str = "") -> Any:
        """Make it call a function; what that returns, or an error that says why it did not."""
        pieces = [json.dumps(_absolute_path()).encode(), *payload.pieces]
        answer = self._converse(frame(Message(Kind.CALL, pieces)), limits=limits, phase=phase)
        value = unpack(answer.pieces)
        if answer.kind is Kind.ERROR:
            raise _remote_error(*value, phase=phase)
        return value

    def kill(self) -> None:
        """End the process and all that it began."""
        self._child.kill()
        self._close()

    def _converse(self, outgoing: list[memoryview], *, limits: Limits, phase: str) -> Message:
        """Whatever is not an answer, an interrupt included, ends the process."""
        try:
            conversation = Conversation(
                self._child, self._incoming, requests=self._requests, limits=limits, phase=phase
            )
            return conversation.run(outgoing)
        except BaseException:
            self.kill()
            raise


def _start(
    fds: tuple[int, int], enclosure: Enclosure, preload: Sequence[str], nursery: Nursery | None
) -> Child:
    told: dict[str, Any] = {"path": _absolute_path(), "preload": list(preload)}
    if nursery is not None:
        told |= {"parent": nursery.pid, "is_tied": True}
        return nursery.fork(_START, json.dumps(told), pass_fds=fds)
    is_tied = threading.current_thread() is threading.main_thread()
    told |= {"parent": os.getpid(), "is_tied": is_tied}
    return spawn(
        [sys.executable, "-c", _START, json.dumps(told), *map(str, fds)],
        environment=enclosure.environment(),
        folder=enclosure.work,
        pass_fds=fds,
    )


def _absolute_path() -> list[str]:
    """Where this process looks for modules, as a process in another folder has to say it."""
    return [os.path.abspath(one) for one in sys.path]


def _remote_error(kind: str, message: str, trace: str, itself: bytes, *, phase: str) -> RemoteError:
    error = RemoteError(kind, message, trace=trace, phase=phase)
    with contextlib.suppress(Exception):  # its type may exist in the worker alone
        cause = unpack(pickle.loads(itself))
        error.__cause__ = cause if isinstance(cause, BaseException) else None
    return error


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)
