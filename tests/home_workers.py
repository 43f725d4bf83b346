"""`diagnose` without processes: the worker's part is played in this one, scripts included.

What really needs another process is tried with one; all else costs a tenth of the time here.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from shardscope.compile.diagnose import diagnose as diagnosing
from shardscope.compile.diagnose import repro_writer as writing
from shardscope.compile.diagnose.worker.fork_server import ScriptRun
from shardscope.compile.diagnose.worker.serialization import pack, unpack
from shardscope.compile.diagnose.worker.server import WorkerContext
from shardscope.errors import RemoteError, WorkerCrashed, WorkerHung

__all__ = ["Death", "HomeScript", "HomeWorkers", "Sleep", "stay_at_home"]

_output_lock = threading.Lock()  # what is printed is the whole process's


class Death(BaseException):
    """Raised by a backend where it would crash: nothing in the process catches it."""


class Sleep(BaseException):
    """Raised by a backend where it would hang."""


class HomeWorkers:
    """Stands for a worker process: what goes there and comes back is packed as it would be."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._preparations: dict[str, Any] = {}
        self._begin()
        self.num_started = 0
        self.calls: list[str] = []
        self.interrupt_at: int | None = None  # the call at which the user presses Ctrl-C

    def _begin(self) -> None:
        self._context: WorkerContext | None = None
        self._prepared: set[str] = set()
        self._phase = ""

    def __enter__(self) -> HomeWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self._begin()

    def prepare(self, function: Callable[..., Any], *args: Any, name: str = "") -> None:
        self._preparations[name] = _copy_call(function, args)

    def forget(self, name: str) -> None:
        self._preparations.pop(name, None)

    def keep_standby(self) -> None:
        pass

    def call(self, function: Callable[..., Any], *args: Any, limits: Any = None) -> Any:
        self.calls.append(function.__name__)
        if self.interrupt_at == len(self.calls):
            raise KeyboardInterrupt
        self._phase = ""
        context = self._ready_context()
        try:
            sent, arguments = unpack(_copy_call(function, args))
            with _output_lock, _warnings_of_its_own():
                return unpack(pack(sent(context, *arguments)).copy().buffers)
        except Death:
            phase = self._phase
            self._begin()
            raise WorkerCrashed("SIGSEGV", phase=phase) from None
        except Sleep:
            phase = self._phase
            self._begin()
            raise WorkerHung(1.0, phase=phase) from None
        except Exception as error:
            kind = f"{type(error).__module__}.{type(error).__qualname__}"
            raise RemoteError(kind.removeprefix("builtins."), str(error)) from error

    def _ready_context(self) -> WorkerContext:
        if self._context is None:
            self.num_started += 1
            self._context = WorkerContext(self._set_phase)
        for name in [
            preparation for preparation in self._preparations if preparation not in self._prepared
        ]:
            function, args = unpack(self._preparations[name])
            function(self._context, *args)
            self._prepared.add(name)
        return self._context

    def _set_phase(self, phase: str) -> None:
        self._phase = phase


def _warnings_of_its_own() -> warnings.catch_warnings[None]:
    """Another process makes no errors of warnings, as tests do."""
    return warnings.catch_warnings(action="ignore")


def _copy_call(function: Callable[..., Any], args: Sequence[Any]) -> Sequence[Any]:
    return pack((function, args)).copy().buffers


class HomeScript:
    """Stands for a fresh process: runs a script in this one, and takes its mess away."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def kill(self) -> None:
        pass

    def run(self, path: Path, *, timeout_s: float, arguments: Sequence[str] = ()) -> ScriptRun:
        printed = io.StringIO()
        with (
            _output_lock,
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            mock.patch.dict(os.environ),
            mock.patch.object(sys, "argv", [str(path), *arguments]),
            _warnings_of_its_own(),
        ):
            torch.compiler.reset()
            code = _run(path)
            torch.compiler.reset()
        return ScriptRun(code, printed.getvalue())


def _run(path: Path) -> int:
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def stay_at_home(monkeypatch: pytest.MonkeyPatch) -> HomeWorkers:
    """Have `diagnose` start no process; returns the workers that run in this one."""
    workers = HomeWorkers()
    monkeypatch.setattr(diagnosing, "open_fork_server", lambda _: None)
    monkeypatch.setattr(diagnosing, "Workers", lambda *_, **__: workers)
    monkeypatch.setattr(writing, "prewarm", HomeScript)
    return workers
