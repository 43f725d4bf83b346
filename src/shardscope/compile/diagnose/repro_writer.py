"""Writes a failure as a script, and verifies it in a fresh process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import final

from msgspec.structs import replace

from shardscope._torch.preload import FOR_SCRIPTS
from shardscope.compile.diagnose.accuracy import CheckResult
from shardscope.compile.diagnose.minimize import INTERRUPTED, MinimizedFailure, add_note
from shardscope.compile.diagnose.repro import (
    EXIT_FAILS,
    EXIT_PASSES,
    PASSING,
    FunctionCall,
    failure_line,
    write_entire_function,
)
from shardscope.compile.diagnose.subgraph import Compiler
from shardscope.compile.diagnose.worker import (
    SAVED_NAME,
    SCRIPT_NAME,
    ForkServer,
    FreshProcess,
    OutputFolder,
    ScriptRun,
    prewarm,
)
from shardscope.compile.diagnose.worker_client import (
    RUNNING,
    ProgressReporter,
    WorkerClient,
    is_device_error,
)
from shardscope.compile.diagnose.worker_tasks import (
    OpSubset,
    ReproRequest,
    ReproScript,
    run_passing_variant,
    write_script,
)
from shardscope.errors import CompileError
from shardscope.record import Condition, Diagnosis

_LIMIT_S = 300.0
_CACHE = "cache"

Runner = Callable[[Path, Sequence[str]], ScriptRun]
"""Runs a script with arguments."""


def verify(
    path: Path, *, outcome: CheckResult, runner: Runner | None = None, limit_s: float = _LIMIT_S
) -> ScriptRun | None:
    """Run a script, and its passing variant if it has one, in fresh processes.

    None if the script shows the failure and the variant passes; otherwise the run that does not.
    """
    cache = path.parent / _CACHE
    run = runner or partial(_run, cache=cache, limit_s=limit_s)
    try:
        failing, passing = _run_both(path, run)
        lines = failing.output.splitlines()
        has_line = any(line.startswith(failure_line(outcome)) for line in lines)
        if failing.exit_code != EXIT_FAILS or not has_line:
            return failing
        return passing if passing is not None and passing.exit_code != EXIT_PASSES else None
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def _run_both(path: Path, run: Runner) -> tuple[ScriptRun, ScriptRun | None]:
    """Run the script and its passing variant in parallel: most of the time goes into imports."""
    pool = ThreadPoolExecutor(2)
    try:
        failing = pool.submit(run, path, ())
        passing = pool.submit(run, path, (PASSING,)) if _has_passing(path) else None
        return failing.result(), None if passing is None else passing.result()
    finally:
        # After an interrupt, do not wait for scripts that may hang.
        pool.shutdown(wait=False)


def _has_passing(path: Path) -> bool:
    return f'"{PASSING}" in sys.argv' in path.read_text(encoding="utf-8")


def _run(path: Path, arguments: Sequence[str], *, cache: Path, limit_s: float) -> ScriptRun:
    """Run a script with all of its output files inside its folder."""
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
        # Compilers start child processes, which would hold the pipe open.
        os.killpg(child.pid, signal.SIGKILL)
        output, _ = child.communicate()
        return ScriptRun(None, output, is_timeout=True)
    return ScriptRun(child.returncode, output)


_START_S = 120.0  # for a process to import torch
_DEADLY = (Condition.CRASH, Condition.HANG)
_SMALL_COMPILE_S = 15.0  # for a few ops that were compiled before
_MAX_SCRIPT_BYTES = 200_000  # limit for scripts stored in a recording


@final
class ReproWriter:
    """Writes and verifies scripts for one compiler."""

    def __init__(
        self,
        client: WorkerClient,
        compiler: Compiler,
        folder: OutputFolder,
        reporter: ProgressReporter,
        *,
        compile_s: float,
        settings: tuple[str, ...],
        fork_server: ForkServer | None = None,
        imports: Sequence[str] = FOR_SCRIPTS,
    ) -> None:
        self._client = client
        self._compiler = compiler
        self._folder = folder
        self._reporter = reporter
        self._compile_s = compile_s
        self._settings = settings
        self._fork_server = fork_server
        self._imports = imports  # of a process that waits for a script
        self.is_interrupted = False  # by the user, who wants the results so far
        self._num_passing_calls = 0  # calls of the backend by the passing variant
        self._waiting: list[FreshProcess] = []
        self._running: list[FreshProcess] = []

    def prepare(self) -> None:
        """Start the process that will run a script in advance: its imports take longest."""
        if not self._waiting:
            fresh = prewarm(
                self._folder.sandbox, imports=self._imports, fork_server=self._fork_server
            )
            self._waiting.append(fresh)

    def close(self) -> None:
        """Kill processes that are no longer needed."""
        for process in (*self._waiting, *self._running):
            process.kill()
        self._waiting.clear()

    def record(self, failure: MinimizedFailure) -> Diagnosis:
        """The diagnosis with a script that reproduces it, if it can be written."""
        self.is_interrupted = failure.is_interrupted
        diagnosis = self._attempt(failure, failure.subset)
        if diagnosis.is_verified or self.is_interrupted or failure.subset.keep is None:
            return diagnosis
        # Outside the worker the failure may need ops that were left out.
        full_graph = self._attempt(failure, OpSubset(failure.subset.key))
        note = "The smallest program fails here but not in a fresh process; the full graph does."
        return (
            add_note(full_graph, note)
            if full_graph.is_verified
            else self._attempt(failure, failure.subset)
        )

    def record_entire_function(
        self, diagnosis: Diagnosis, call: FunctionCall, outcome: CheckResult
    ) -> Diagnosis:
        """The diagnosis with a script of the entire function, because no op is the cause."""
        self._reporter.show_task("writing the script")
        try:
            path = write_entire_function(
                call,
                self._compiler,
                outcome,
                folder=self._folder.path.resolve(),
                title=f"{diagnosis.target} under {diagnosis.backend}",
                stage=diagnosis.stage,
                limit_s=self._find_limit(outcome),
                settings=self._settings,
            )
        except Exception as error:  # noqa: BLE001 - objects that cannot be pickled raise any error
            return add_note(diagnosis, _describe_unwritable(error))
        return self._verify_script(
            replace(diagnosis, repro=_shown(path), script=_read(path)), path, outcome
        )

    def withdraw(self) -> None:
        """Remove the script that was written last, because it reproduces nothing."""
        for name in (SCRIPT_NAME, SAVED_NAME):
            (self._folder.path / name).unlink(missing_ok=True)

    def _attempt(self, failure: MinimizedFailure, subset: OpSubset) -> Diagnosis:
        self._reporter.show_task("writing the script")
        try:
            written = self._write(failure, subset)
        except CompileError as error:
            return add_note(failure.diagnosis, _describe_unwritable(error, " of these ops"))
        except KeyboardInterrupt:
            if self.is_interrupted:
                raise
            self.is_interrupted = True
            return self._attempt(failure, subset)
        if isinstance(written, CheckResult):
            return add_note(failure.diagnosis, f"No script could be written: {written.fact}.")
        diagnosis = replace(
            failure.diagnosis,
            repro=_shown(written.path),
            script=_read(written.path),
            passing=f"the same {written.passing}",
        )
        if self.is_interrupted:
            return add_note(diagnosis, INTERRUPTED)
        return self._verify_script(diagnosis, written.path, failure.outcome)

    def _write(self, failure: MinimizedFailure, subset: OpSubset) -> ReproScript | CheckResult:
        diagnosis = failure.diagnosis
        request = ReproRequest(
            subset=subset,
            passing=failure.passing,
            compiler=self._compiler,
            outcome=failure.outcome,
            folder=self._folder.path.resolve(),
            title=f"{diagnosis.target} under {diagnosis.backend}",
            stage=diagnosis.stage,
            limit_s=self._find_limit(failure.outcome),
            settings=self._settings,
            may_try=self._may_try(failure.outcome),
        )
        written: ReproScript | CheckResult = self._client.run(write_script, request, num_calls=0)
        if isinstance(written, ReproScript):
            self._client.count(written.num_calls)
            self._num_passing_calls = int(written.passing_calls_backend)
        return written

    def _may_try(self, outcome: CheckResult) -> bool:
        """Whether to call the backend for a better script: not if it may crash, or after an
        interrupt.
        """
        is_deadly = outcome.condition in _DEADLY or is_device_error(outcome.error)
        return not is_deadly and not self.is_interrupted

    def _find_limit(self, outcome: CheckResult) -> float:
        """Seconds that the script may take before it counts as hanging."""
        is_running = outcome.condition is Condition.HANG and outcome.signature in RUNNING
        return self._client.run_s + (_SMALL_COMPILE_S if is_running else self._compile_s)

    def _verify_script(self, diagnosis: Diagnosis, path: Path, outcome: CheckResult) -> Diagnosis:
        self._reporter.show_task("running the script in a fresh process")
        self.prepare()
        try:
            unlike = verify(path, outcome=outcome, runner=self._run)
        except KeyboardInterrupt:
            self.is_interrupted = True
            self.close()
            return add_note(diagnosis, INTERRUPTED)
        if unlike is None:
            return replace(diagnosis, is_verified=True)
        return add_note(diagnosis, _describe_unlike(unlike))

    def _run(self, path: Path, arguments: Sequence[str]) -> ScriptRun:
        # A script that reproduces a hang or crash starts a process, and waits for its time limit.
        limit_s = _START_S + 2 * (self._compile_s + self._client.run_s)
        if PASSING in arguments:
            num_calls = self._num_passing_calls
            reply = self._client.run(
                run_passing_variant, path, num_calls=num_calls, limit_s=limit_s
            )
            return ScriptRun(None, reply.fact) if isinstance(reply, CheckResult) else reply
        self._client.count(1)
        process = self._waiting.pop()
        self._running.append(process)
        return process.run(path, timeout_s=limit_s, arguments=arguments)


def _describe_unwritable(error: Exception, of_what: str = "") -> str:
    return f"No script{of_what} could be written ({str(error).rstrip('.')})."


def _describe_unlike(run: ScriptRun) -> str:
    lines = run.output.strip().splitlines()
    end = "did not end" if run.exit_code is None else f"ended with exit code {run.exit_code}"
    printed = f" and printed: {lines[-1][:200]}" if lines else ""
    return f"A fresh process that ran the script {end}{printed}."


def _shown(path: Path) -> str:
    """The path relative to the user's folder, if it is inside it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _read(path: Path) -> str:
    """The script's text, to be stored in the recording; empty if it is too long."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return text if len(text.encode()) <= _MAX_SCRIPT_BYTES else ""
