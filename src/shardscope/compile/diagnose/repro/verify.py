"""Whether a repro shows in a fresh process what it was written for."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

from shardscope.compile.diagnose.outcome import Outcome
from shardscope.compile.diagnose.repro.script import (
    EXIT_FAILS,
    EXIT_PASSES,
    PASSING,
    failure_line,
)

__all__ = ["Verified", "verify"]

_LIMIT_S = 300.0
_CACHE = "cache"

_Result = tuple[int | None, str]
Runner = Callable[[Path, Sequence[str]], _Result]
"""Runs a script with arguments; its exit code, None if it did not finish, and what it printed."""


@final
@dataclass(frozen=True)
class Verified:
    """What fresh processes saw; a script without a passing variant passes with none."""

    is_same: bool
    exit_code: int | None  # None if it did not finish
    output: str


def verify(
    path: Path, *, outcome: Outcome, runner: Runner | None = None, limit_s: float = _LIMIT_S
) -> Verified:
    """Whether the script shows the failure, and its passing variant, if it has one, does not."""
    cache = path.parent / _CACHE
    run = runner or partial(_run, cache=cache, limit_s=limit_s)
    try:
        (code, output), passing = _run_both(path, run)
        has_line = any(line.startswith(failure_line(outcome)) for line in output.splitlines())
        if code != EXIT_FAILS or not has_line:
            return Verified(False, code, output)
        if passing is not None and passing[0] != EXIT_PASSES:
            return Verified(False, *passing)
        return Verified(True, code, output)
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def _run_both(path: Path, run: Runner) -> tuple[_Result, _Result | None]:
    """The script and its passing variant, at the same time: most of it is waiting for imports."""
    pool = ThreadPoolExecutor(2)
    try:
        failing = pool.submit(run, path, ())
        passing = pool.submit(run, path, (PASSING,)) if _has_passing(path) else None
        return failing.result(), None if passing is None else passing.result()
    finally:
        # Whoever is interrupted does not wait for scripts that may hang.
        pool.shutdown(wait=False)


def _has_passing(path: Path) -> bool:
    return f'"{PASSING}" in sys.argv' in path.read_text(encoding="utf-8")


def _run(
    path: Path, arguments: Sequence[str], *, cache: Path, limit_s: float
) -> tuple[int | None, str]:
    """Run a script so that it writes into its folder alone."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache.resolve())}
    child = subprocess.Popen(
        [sys.executable, path.name, *arguments],
        cwd=path.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        # Compilers have processes of their own, which would hold the pipe open.
        os.killpg(child.pid, signal.SIGKILL)
        output, _ = child.communicate()
        return None, output
    return child.returncode, output
