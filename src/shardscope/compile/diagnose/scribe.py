"""Writes what was found as a script, and believes it when a fresh process shows the same."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import final

from msgspec.structs import replace

from shardscope._torch.preloading import FOR_SCRIPTS
from shardscope.compile.diagnose.at_bench import Piece, Request, Written, run_passing, write
from shardscope.compile.diagnose.compiler import Compiler
from shardscope.compile.diagnose.culprit import INTERRUPTED, Found, add_note
from shardscope.compile.diagnose.folder import SAVED_NAME, SCRIPT_NAME, Folder
from shardscope.compile.diagnose.isolation.nursery import Nursery
from shardscope.compile.diagnose.isolation.scripts import FreshProcess, prewarm
from shardscope.compile.diagnose.outcome import Outcome
from shardscope.compile.diagnose.progress import Teller
from shardscope.compile.diagnose.queries import RUNNING, Queries, is_of_device
from shardscope.compile.diagnose.repro.script import PASSING
from shardscope.compile.diagnose.repro.verify import Verified, verify
from shardscope.compile.diagnose.repro.whole import Call, write_whole
from shardscope.errors import CompileError
from shardscope.record import Condition, Diagnosis

__all__ = ["Scribe"]

_START_S = 120.0  # that a process may take to import torch
_DEADLY = (Condition.CRASH, Condition.HANG)
_SMALL_COMPILE_S = 15.0  # that a few ops may take which were compiled before
_MAX_SCRIPT_BYTES = 200_000  # that a recording has room for


@final
class Scribe:
    """Writes and verifies scripts for one compiler."""

    def __init__(
        self,
        queries: Queries,
        compiler: Compiler,
        folder: Folder,
        teller: Teller,
        *,
        compile_s: float,
        settings: tuple[str, ...],
        nursery: Nursery | None = None,
        imports: Sequence[str] = FOR_SCRIPTS,
    ) -> None:
        self._queries = queries
        self._compiler = compiler
        self._folder = folder
        self._teller = teller
        self._compile_s = compile_s
        self._settings = settings
        self._nursery = nursery
        self._imports = imports  # of a process that waits for a script
        self.is_interrupted = False  # by the user, who wants what there is
        self._num_passing_calls = 0  # of the backend, by the variant that passes
        self._waiting: list[FreshProcess] = []
        self._running: list[FreshProcess] = []

    def prepare(self) -> None:
        """Begin to start the process that a script is to run in: its imports take longest."""
        if not self._waiting:
            fresh = prewarm(self._folder.enclosure, imports=self._imports, nursery=self._nursery)
            self._waiting.append(fresh)

    def close(self) -> None:
        """End processes that nobody needs any more."""
        for process in (*self._waiting, *self._running):
            process.kill()
        self._waiting.clear()

    def record(self, found: Found) -> Diagnosis:
        """A diagnosis with a script that shows it, if one can be written."""
        self.is_interrupted = found.is_interrupted
        told = self._attempt(found, found.piece)
        if told.is_verified or self.is_interrupted or found.piece.keep is None:
            return told
        # What was cut off may be what a process without our bench needs to fail.
        whole = self._attempt(found, Piece(found.piece.key))
        note = "The smallest program fails here but not in a fresh process; the full graph does."
        return add_note(whole, note) if whole.is_verified else self._attempt(found, found.piece)

    def record_whole(self, begun: Diagnosis, call: Call, outcome: Outcome) -> Diagnosis:
        """A diagnosis with a script of the whole function: no op of it is to blame."""
        self._teller.doing("writing the script")
        try:
            path = write_whole(
                call,
                self._compiler,
                outcome,
                folder=self._folder.path.resolve(),
                title=f"{begun.target} under {begun.backend}",
                stage=begun.stage,
                limit_s=self._find_limit(outcome),
                settings=self._settings,
            )
        except Exception as error:  # noqa: BLE001 - whatever cannot be pickled says so in its own way
            return add_note(begun, _describe_unwritable(error))
        return self._verified(replace(begun, repro=_shown(path), script=_read(path)), path, outcome)

    def withdraw(self) -> None:
        """Remove the script that was written last: there is nothing that it could show."""
        for name in (SCRIPT_NAME, SAVED_NAME):
            (self._folder.path / name).unlink(missing_ok=True)

    def _attempt(self, found: Found, piece: Piece) -> Diagnosis:
        self._teller.doing("writing the script")
        try:
            written = self._write(found, piece)
        except CompileError as error:
            return add_note(found.diagnosis, _describe_unwritable(error, " of these ops"))
        except KeyboardInterrupt:
            if self.is_interrupted:
                raise
            self.is_interrupted = True
            return self._attempt(found, piece)
        if isinstance(written, Outcome):
            return add_note(found.diagnosis, f"No script could be written: {written.fact}.")
        told = replace(
            found.diagnosis,
            repro=_shown(written.path),
            script=_read(written.path),
            passing=f"the same {written.passing}",
        )
        if self.is_interrupted:
            return add_note(told, INTERRUPTED)
        return self._verified(told, written.path, found.outcome)

    def _write(self, found: Found, piece: Piece) -> Written | Outcome:
        one = found.diagnosis
        request = Request(
            piece=piece,
            passing=found.passing,
            compiler=self._compiler,
            outcome=found.outcome,
            folder=self._folder.path.resolve(),
            title=f"{one.target} under {one.backend}",
            stage=one.stage,
            limit_s=self._find_limit(found.outcome),
            settings=self._settings,
            may_try=self._may_try(found.outcome),
        )
        written: Written | Outcome = self._queries.run(write, request, num_calls=0)
        if isinstance(written, Written):
            self._queries.count(written.num_calls)
            self._num_passing_calls = int(written.passing_calls_backend)
        return written

    def _may_try(self, outcome: Outcome) -> bool:
        """Whether to call the backend for a better script: not if that kills, or nobody waits."""
        is_deadly = outcome.condition in _DEADLY or is_of_device(outcome.error)
        return not is_deadly and not self.is_interrupted

    def _find_limit(self, outcome: Outcome) -> float:
        """Seconds that the script may take before it is said to hang."""
        is_running = outcome.condition is Condition.HANG and outcome.signature in RUNNING
        return self._queries.run_s + (_SMALL_COMPILE_S if is_running else self._compile_s)

    def _verified(self, told: Diagnosis, path: Path, outcome: Outcome) -> Diagnosis:
        self._teller.doing("running the script in a fresh process")
        self.prepare()
        try:
            seen = verify(path, outcome=outcome, runner=self._run)
        except KeyboardInterrupt:
            self.is_interrupted = True
            self.close()
            return add_note(told, INTERRUPTED)
        if seen.is_same:
            return replace(told, is_verified=True)
        return add_note(told, _describe_failure(seen))

    def _run(self, path: Path, arguments: Sequence[str]) -> tuple[int | None, str]:
        # A script that looks for a hang or a crash starts a process, and waits as long as it says.
        limit_s = _START_S + 2 * (self._compile_s + self._queries.run_s)
        if PASSING in arguments:
            num_calls = self._num_passing_calls
            told = self._queries.run(run_passing, path, num_calls=num_calls, limit_s=limit_s)
            return (None, told.fact) if isinstance(told, Outcome) else told
        self._queries.count(1)
        process = self._waiting.pop()
        self._running.append(process)
        result = process.run(path, timeout_s=limit_s, arguments=arguments)
        return result.exit_code, result.output


def _describe_unwritable(error: Exception, of_what: str = "") -> str:
    return f"No script{of_what} could be written ({str(error).rstrip('.')})."


def _describe_failure(seen: Verified) -> str:
    lines = seen.output.strip().splitlines()
    end = "did not end" if seen.exit_code is None else f"ended with exit code {seen.exit_code}"
    said = f" and printed: {lines[-1][:200]}" if lines else ""
    return f"A fresh process that ran the script {end}{said}."


def _shown(path: Path) -> str:
    """As the user would name it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _read(path: Path) -> str:
    """The script's text, so that a recording is all that a colleague needs to see it."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return text if len(text.encode()) <= _MAX_SCRIPT_BYTES else ""
