"""`diagnose(fn, …)`: is what a compiler makes of a function right, and if not, what is to blame?

The function's graphs are captured here and compiled in a worker process, where the smallest piece
that still fails is searched for, blamed on a stage of the compiler, and written down as a script.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from shardscope._torch.compiler_settings import read_settings
from shardscope.comm.run import read_identity
from shardscope.compile.diagnose.at_bench import set_up
from shardscope.compile.diagnose.compiler import Compiler
from shardscope.compile.diagnose.culprit import Culprit
from shardscope.compile.diagnose.examine import Examination
from shardscope.compile.diagnose.folder import Folder
from shardscope.compile.diagnose.isolation.borrow import borrow_from_inductor
from shardscope.compile.diagnose.isolation.payload import pack
from shardscope.compile.diagnose.isolation.workers import Workers
from shardscope.compile.diagnose.judging.judge import resolve
from shardscope.compile.diagnose.progress import shown_progress
from shardscope.compile.diagnose.queries import Patience, Queries
from shardscope.compile.diagnose.records import make_recording
from shardscope.compile.diagnose.scribe import Scribe
from shardscope.compile.diagnose.subject import Subject
from shardscope.errors import CompileError
from shardscope.record import Condition, Diagnosis, Recording

__all__ = ["Diagnosed", "diagnose"]

_PRELOADED = ("torch", "torch._dynamo", "shardscope.compile.diagnose.at_bench")


@final
class Diagnosed:
    """What was found out: `diagnosis`, and a `recording` with it and what to do about it."""

    def __init__(self, diagnosis: Diagnosis, recording: Recording) -> None:
        self.diagnosis = diagnosis
        self.recording = recording

    @property
    def condition(self) -> Condition:
        """Fine, or what is wrong."""
        return self.diagnosis.condition

    @property
    def repro(self) -> Path | None:
        """The script that shows what is wrong."""
        return Path(self.diagnosis.repro) if self.diagnosis.repro else None

    def __repr__(self) -> str:
        one = self.diagnosis
        stage = f" in {one.stage}" if one.stage is not None else ""
        ops = ", ".join(suspect.op for suspect in one.suspects[:3])
        return f"Diagnosed({one.condition}{stage}{f': {ops}' if ops else ''})"


def diagnose(
    fn: Callable[..., Any],
    *args: Any,
    backend: str | Callable[..., Any] = "inductor",
    kwargs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    folder: str | Path | None = None,
    max_queries: int = 200,
    timeout_s: float = 300.0,
    seed: int = 0,
    name: str = "",
) -> Diagnosed:
    """Compile a function or model, compare it with itself, and find what is to blame if it differs.

    >>> found = diagnose(model, tokens, backend="inductor")
    >>> found.condition, found.repro

    Called with `args` and `kwargs`, and differentiated where its results can be. `backend`,
    `options`, `mode` and `dynamic` are those of torch.compile. The function, its caches, buffers
    and random numbers are left as they were: what the backend makes runs in another process, and
    everything it writes goes to `folder`, as the script that shows the failure does. The search
    ends when the backend has been called `max_queries` times, of which it keeps some for what
    follows; each may take `timeout_s` seconds. Ctrl-C ends the search and keeps the smallest
    program found so far.
    """
    compiler = Compiler(backend, options=options, mode=mode, dynamic=dynamic)
    _check(fn, compiler, max_queries, timeout_s)
    subject = Subject(fn, args, dict(kwargs or {}), name=name, seed=seed)
    place = Folder(None if folder is None else Path(folder))
    try:
        with Workers(place.enclosure, preload=_PRELOADED, has_standby=False) as workers:
            if "inductor" in compiler.name:
                borrow_from_inductor(place.enclosure)
            found = _examine(subject, compiler, workers, place, max_queries, timeout_s)
    finally:
        place.tidy()
    _, world_size = read_identity()
    return Diagnosed(found, make_recording(found, world_size=world_size))


def _examine(
    subject: Subject,
    compiler: Compiler,
    workers: Workers,
    place: Folder,
    budget: int,
    timeout_s: float,
) -> Diagnosis:
    with shown_progress(budget) as teller:
        queries = Queries(workers, compiler, Patience(timeout_s), teller.asked)
        culprit = Culprit(queries, compiler, teller, budget=budget)
        settings = read_settings()
        workers.prepare(set_up, settings, name="settings")
        scribe = Scribe(queries, compiler, place, teller, compile_s=timeout_s, settings=settings)
        try:
            return Examination(subject, compiler, queries, culprit, scribe, teller).run()
        finally:
            scribe.close()


def _check(fn: Any, compiler: Compiler, max_queries: int, timeout_s: float) -> None:
    if not callable(fn):
        raise CompileError(
            f"diagnose() got {type(fn).__name__} where it wants a function or a module. Give the "
            "function first, then what it is called with."
        )
    if max_queries < 1 or timeout_s <= 0:
        raise CompileError(
            f"diagnose() got max_queries={max_queries} and timeout_s={timeout_s}, which leave no "
            "room for a single compilation. Give positive numbers."
        )
    resolve(compiler)
    try:
        pack(compiler)
    except Exception as error:
        raise CompileError(
            f"the backend {compiler.name} cannot be sent to the process in which it is to run "
            f"({type(error).__name__}: {error}). Leave out of it, and of its options, what cannot "
            "be pickled: locks, files, generators."
        ) from error
