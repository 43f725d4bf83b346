"""The worker process: the functions that it runs (`runs_in_worker`), and its main loop."""

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
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeVar, final

from shardscope.compile.diagnose.worker.rpc import Incoming, Kind, Message, frame, read_message
from shardscope.compile.diagnose.worker.script_runner import end_with_parent
from shardscope.compile.diagnose.worker.serialization import pack, unpack
from shardscope.errors import CompileError

_MAX_TEXT = 20_000
_MAX_ERROR_BYTES = 1 << 20
_LOOK_S = 0.5  # between two readings of the stacks
_MAX_FRAMES = 50
_DIGITS = re.compile(r"\d+")


@final
class WorkerContext:
    """What a task knows of the worker process that it runs in.

    Values in `store` are available to later tasks of the same process.
    """

    def __init__(self, send_phase: Callable[[str], None]) -> None:
        self.store: dict[str, Any] = {}
        self._send_phase = send_phase

    def report_phase(self, phase: str) -> None:
        """Report that a new phase begins, which has its own time limit."""
        self._send_phase(phase)


TaskT = TypeVar("TaskT", bound=Callable[..., object])
TASKS: dict[str, Callable[..., object]] = {}
"""The functions marked with `runs_in_worker`, by name."""


def runs_in_worker(function: TaskT) -> TaskT:
    """Mark a function as a task: it runs in the worker process, never in the user's process.

    Its first argument is the worker's `WorkerContext`, the others are sent by the caller.
    `WorkerClient` runs tasks only, and names are unique:

        @runs_in_worker
        def check_ops(context: WorkerContext, subset: OpSubset, compiler: Compiler): ...

        client.run(check_ops, subset, compiler)  # compiled code runs in the worker
    """
    assert function.__name__ not in TASKS, f"there are two tasks called {function.__name__}"
    TASKS[function.__name__] = function
    return function


def check_is_task(function: Callable[..., object]) -> None:
    """Raise TypeError unless the function is marked with `runs_in_worker`."""
    name = getattr(function, "__name__", type(function).__name__)
    if TASKS.get(name) is not function:
        raise TypeError(
            f"{name} is not a task of the worker. Mark it with @runs_in_worker, or call it in this "
            "process."
        )


def serve(
    requests: int, replies: int, *, parent: int, is_tied: bool, preload: Sequence[str]
) -> None:
    """Answer calls until the pipe is closed."""
    end_with_parent(parent, is_tied=is_tied)
    for fd in (requests, replies):
        os.set_inheritable(fd, False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # to find where it hangs
    threading.Thread(target=_end_at_hang_up, args=(requests,), daemon=True).start()
    for module in preload:
        importlib.import_module(module)
    sys.argv[:] = [""]
    replier = _Replier(replies)
    replier.send(Message(Kind.READY))
    progress = _ProgressReporter(replier)
    threading.Thread(target=progress.watch, daemon=True).start()
    context = WorkerContext(progress.begin)
    incoming = Incoming(requests)
    while (message := read_message(incoming)) is not None:
        with progress:
            _answer(message, context, replier)


@final
class _Replier:
    """Sends complete messages from any thread."""

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
    """Reports the phases of a call, and in each phase when a thread executes new code.

    An endless loop repeats the same stacks; a program that makes progress does not.
    """

    def __init__(self, replier: _Replier) -> None:
        self._replier = replier
        self._is_busy = threading.Event()
        self._known_stacks: set[int] = set()

    def __enter__(self) -> None:
        self._known_stacks.clear()
        self._is_busy.set()

    def __exit__(self, *_: object) -> None:
        self._is_busy.clear()

    def begin(self, phase: str) -> None:
        """Report the start of a phase."""
        self._replier.send(Message(Kind.PHASE, [phase.encode()]))
        self._known_stacks.clear()

    def watch(self) -> None:
        """Read the stacks of all threads at intervals; never returns."""
        while self._is_busy.wait():
            time.sleep(_LOOK_S)
            stacks = {_hash_stack(frame) for frame in sys._current_frames().values()}
            if not stacks <= self._known_stacks and self._is_busy.is_set():
                self._known_stacks |= stacks
                self._replier.send(Message(Kind.PROGRESS))


def _hash_stack(frame: FrameType | None) -> int:
    """A hash of the innermost lines of a stack, without digits in the names of generated files."""
    lines: list[tuple[str, int]] = []
    while frame is not None and len(lines) < _MAX_FRAMES:
        lines.append((_DIGITS.sub("", frame.f_code.co_filename), frame.f_lineno))
        frame = frame.f_back
    return hash(tuple(lines))


def _answer(message: Message, context: WorkerContext, replier: _Replier) -> None:
    path, *buffers = message.buffers
    message.buffers = ()  # do not keep the tensors' bytes longer than needed
    sys.path[:] = json.loads(bytes(path))
    try:
        payload = pack(_carry_out(buffers, context))
    except BaseException as error:  # noqa: BLE001 - a call that exits the process is an error too
        replier.send(Message(Kind.ERROR, pack(_describe(error)).buffers))
    else:
        replier.send(Message(Kind.VALUE, payload.buffers))


def _carry_out(buffers: list[Any], context: WorkerContext) -> Any:
    try:
        function, args = unpack(buffers)
    except Exception as error:
        if isinstance(error, CompileError):
            raise
        raise CompileError(
            f"the worker cannot unpickle what it was sent ({type(error).__name__}: {error}). "
            f"Are all modules that it needs on sys.path?"
        ) from error
    buffers.clear()
    return function(context, *args)


def _describe(error: BaseException) -> tuple[str, str, str, bytes]:
    """The type, message and traceback of an error, and the pickled error if possible."""
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    try:
        message = str(error)
    except Exception as another:  # noqa: BLE001 - `__str__` of a user's error may raise
        message = f"(its message could not be formatted: {type(another).__name__})"
    trace = "".join(traceback.format_exception(error))
    itself = b""
    with contextlib.suppress(Exception):
        itself = pickle.dumps(pack(error).copy().buffers)
    return kind, message, trace[-_MAX_TEXT:], itself if len(itself) < _MAX_ERROR_BYTES else b""


def _end_at_hang_up(requests: int) -> None:
    """When the other end of the pipe is closed, kill this process and its children."""
    poll = select.poll()
    poll.register(requests, 0)
    poll.poll()
    os.killpg(0, signal.SIGKILL)
