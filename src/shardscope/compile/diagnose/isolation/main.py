"""The worker's side: wait for calls, carry them out, answer."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import pickle
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any, final

from shardscope.compile.diagnose.isolation.bench import Bench
from shardscope.compile.diagnose.isolation.fresh import end_with_parent
from shardscope.compile.diagnose.isolation.payload import pack, unpack
from shardscope.compile.diagnose.isolation.wire import (
    Incoming,
    Kind,
    Message,
    frame,
    read_message,
)
from shardscope.errors import CompileError

__all__ = ["serve"]

_MAX_TEXT = 20_000
_MAX_ERROR_BYTES = 1 << 20
_LOOK_S = 0.5  # between two looks at the stacks
_MAX_FRAMES = 50
_DIGITS = re.compile(r"\d+")


def serve(
    requests: int, replies: int, *, parent: int, is_tied: bool, preload: Sequence[str]
) -> None:
    """Answer calls until there is nobody left who could ask."""
    end_with_parent(parent, is_tied=is_tied)
    for fd in (requests, replies):
        os.set_inheritable(fd, False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # where does it hang?
    threading.Thread(target=_end_at_hang_up, args=(requests,), daemon=True).start()
    for module in preload:
        importlib.import_module(module)
    sys.argv[:] = [""]
    replier = _Replier(replies)
    replier.send(Message(Kind.READY))
    progress = _ProgressReporter(replier)
    threading.Thread(target=progress.watch, daemon=True).start()
    bench = Bench(progress.begin)
    incoming = Incoming(requests)
    while (message := read_message(incoming)) is not None:
        with progress:
            _answer(message, bench, replier)


@final
class _Replier:
    """Sends whole messages, whichever thread has something to say."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        with self._lock:
            for view in frame(message):
                while view.nbytes:
                    view = view[os.write(self._fd, view) :]


@final
class _ProgressReporter:
    """Tells the phases of a call, and within one whenever a thread is met in code that is new.

    A loop that never ends comes by the same places over and over; what goes on does not.
    """

    def __init__(self, replier: _Replier) -> None:
        self._replier = replier
        self._is_busy = threading.Event()
        self._seen: set[int] = set()

    def __enter__(self) -> None:
        self._seen.clear()
        self._is_busy.set()

    def __exit__(self, *_: object) -> None:
        self._is_busy.clear()

    def begin(self, phase: str) -> None:
        """A phase begins."""
        self._replier.send(Message(Kind.PHASE, [phase.encode()]))
        self._seen.clear()

    def watch(self) -> None:
        """Look at the stacks of all threads from time to time; never returns."""
        while self._is_busy.wait():
            time.sleep(_LOOK_S)
            stacks = {_hash_stack(frame) for frame in sys._current_frames().values()}
            if not stacks <= self._seen and self._is_busy.is_set():
                self._seen |= stacks
                self._replier.send(Message(Kind.PROGRESS))


def _hash_stack(frame: FrameType | None) -> int:
    """The innermost lines of a stack. Numbers in the names of generated files mean nothing."""
    lines: list[tuple[str, int]] = []
    while frame is not None and len(lines) < _MAX_FRAMES:
        lines.append((_DIGITS.sub("", frame.f_code.co_filename), frame.f_lineno))
        frame = frame.f_back
    return hash(tuple(lines))


def _answer(message: Message, bench: Bench, replier: _Replier) -> None:
    path, *pieces = message.pieces
    message.pieces = ()  # what tensors were made from is not held any longer than they need it
    sys.path[:] = json.loads(bytes(path))
    try:
        payload = pack(_carry_out(pieces, bench))
    except BaseException as error:  # noqa: BLE001 - a call that exits the process is an error too
        replier.send(Message(Kind.ERROR, pack(_describe(error)).pieces))
    else:
        replier.send(Message(Kind.VALUE, payload.pieces))


def _carry_out(pieces: list[Any], bench: Bench) -> Any:
    try:
        function, args = unpack(pieces)
    except Exception as error:
        if isinstance(error, CompileError):
            raise
        raise CompileError(
            f"the worker cannot make what it was sent ({type(error).__name__}: {error}). "
            f"Are all modules that it needs on sys.path?"
        ) from error
    pieces.clear()
    return function(bench, *args)


def _describe(error: BaseException) -> tuple[str, str, str, bytes]:
    """The type, message and traceback of an error, and itself if it can be sent."""
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    try:
        message = str(error)
    except Exception as another:  # noqa: BLE001 - an error of the user's that cannot say what it is
        message = f"(its message cannot be made: {type(another).__name__})"
    trace = "".join(traceback.format_exception(error))
    itself = b""
    with contextlib.suppress(Exception):
        itself = pickle.dumps(pack(error).copy().pieces)
    return kind, message, trace[-_MAX_TEXT:], itself if len(itself) < _MAX_ERROR_BYTES else b""


def _end_at_hang_up(requests: int) -> None:
    """When nobody holds the other end of the pipe, end this process and all that it began."""
    poll = select.poll()
    poll.register(requests, 0)
    poll.poll()
    os.killpg(0, signal.SIGKILL)
