"""The client of the worker process: counts and caches queries, handles crashes, shows progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple, final

from shardscope.compile.diagnose.accuracy import CheckResult
from shardscope.compile.diagnose.subgraph import Compiler, Subgraph
from shardscope.compile.diagnose.worker import (
    PREPARING,
    STARTING,
    WorkerContext,
    Workers,
    check_is_task,
    describe_subgraph,
)
from shardscope.compile.diagnose.worker.harness import plain_words
from shardscope.compile.diagnose.worker_tasks import (
    OpSubset,
    SubgraphInfo,
    check_ops,
    load_subgraph,
    read_subgraph_info,
)
from shardscope.errors import CompileError, RemoteError, ShardscopeError, WorkerCrashed, WorkerHung
from shardscope.record import Condition, Phase

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

ResultT = TypeVar("ResultT")
ArgTs = TypeVarTuple("ArgTs")

_MIN_RUN_S = 2.0  # lower limit, for very short eager runs
_FIRST_RUN_S = 10.0
_EAGER_FACTOR = 20.0
RUNNING = ("running", "backward", "running forward", "running backward")
"""Phases in which what was compiled is run."""


@final
@dataclass(frozen=True)
class Timeouts:
    """Time limits of compilations and runs."""

    compile_s: float

    def run_s(self, eager_s: float, *, has_hung: bool) -> float:
        """Seconds that a compiled run may take; fewer after a hang."""
        return (_MIN_RUN_S if has_hung else _FIRST_RUN_S) + _EAGER_FACTOR * eager_s

    def limits(self, run_s: float) -> dict[str, float]:
        """Seconds for each phase of a check."""
        return {"": max(self.compile_s, run_s), **dict.fromkeys(RUNNING, run_s)}


@final
class WorkerClient:
    """Runs checks of one compiler on the subgraphs of one function in a worker process."""

    def __init__(
        self,
        workers: Workers,
        compiler: Compiler,
        timeouts: Timeouts,
        on_query: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.num_calls = 0  # of the backend
        self.last_phase = ""  # of a process that died
        self._workers = workers
        self._compiler = compiler
        self._timeouts = timeouts
        self._on_query = on_query
        self._loaded: dict[int, SubgraphInfo] = {}
        self._outcomes: dict[OpSubset, CheckResult] = {}
        self._has_hung = False

    def load(self, key: int, subgraph: Subgraph) -> SubgraphInfo:
        """Send a subgraph to the current worker and to each worker after it.

        Raises CompileError if it cannot be sent, or cannot be run eagerly op by op.
        """
        data, name = describe_subgraph(subgraph), f"fragment {key}"
        self.prepare(load_subgraph, key, data, name=name)
        try:
            self._loaded[key] = self._workers.call(read_subgraph_info, key)
        except CompileError:
            self._workers.forget(name)
            raise
        return self._loaded[key]

    def prepare(
        self,
        task: Callable[[WorkerContext, *ArgTs], object],
        *args: *ArgTs,
        name: str,
    ) -> None:
        """Run a task in the current worker and in each worker after it, before anything else.

        A preparation of the same name replaces the earlier one.
        """
        check_is_task(task)
        self._workers.prepare(task, *args, name=name)

    def check(self, subset: OpSubset) -> CheckResult:
        """How the compiler does on a subset of ops, compared with eager execution; cached."""
        if subset.keep is not None and len(subset.keep) == len(self._loaded[subset.key].ops):
            subset = OpSubset(subset.key)
        if subset not in self._outcomes:
            self._outcomes[subset] = self.run(check_ops, subset, self._compiler)
        return self._outcomes[subset]

    def run(
        self,
        task: Callable[[WorkerContext, *ArgTs], ResultT],
        *args: *ArgTs,
        num_calls: int = 1,
        limit_s: float | None = None,
    ) -> ResultT | CheckResult:
        """Run a task that calls the backend; if the worker crashes or hangs, that is the outcome.

        The task calls the backend `num_calls` times. `limit_s` replaces the time limits of the
        phases. Raises CompileError for errors that the backend did not cause, BackendError for bad
        options.
        """
        check_is_task(task)
        self.count(num_calls)
        limits = self._timeouts.limits(self.run_s) if limit_s is None else limit_s
        try:
            reply = self._workers.call(task, *args, limits=limits)
            if isinstance(reply, CheckResult) and is_device_error(reply.error):
                self._workers.discard()
            return reply
        except RemoteError as error:
            if isinstance(error.__cause__, ShardscopeError):  # raised on purpose, for the user
                raise error.__cause__ from None
            if not is_device_error(str(error)):
                raise
            self._workers.discard()
            return _describe_device_error(error)
        except (WorkerCrashed, WorkerHung) as end:
            if end.phase in (STARTING, PREPARING):  # not caused by the backend
                raise
            self._prepare_for_crashes(end.phase)
            if isinstance(end, WorkerHung):
                self._has_hung = True
                return _describe_hang(end)
            return _describe_crash(end)

    def _prepare_for_crashes(self, phase: str) -> None:
        self.last_phase = phase
        self._workers.keep_standby()

    def read(self, task: Callable[[WorkerContext, *ArgTs], ResultT], *args: *ArgTs) -> ResultT:
        """Run a task that does not call the backend.

        It is repeated after one interrupt, because the user still wants the results so far.
        """
        check_is_task(task)
        try:
            return self._workers.call(task, *args)
        except KeyboardInterrupt:
            return self._workers.call(task, *args)

    def count(self, num_calls: int) -> None:
        """Count calls of the backend."""
        self.num_calls += num_calls
        if num_calls:
            self._on_query(self.num_calls)

    @property
    def run_s(self) -> float:
        """Seconds that a compiled run may take."""
        eager_s = max((info.eager_s for info in self._loaded.values()), default=1.0)
        return self._timeouts.run_s(eager_s, has_hung=self._has_hung)


def is_device_error(error: str) -> bool:
    """Whether an error leaves the device unusable for the process that caused it."""
    return "CUDA error" in error or "AcceleratorError" in error


def _describe_device_error(error: RemoteError) -> CheckResult:
    words = plain_words(error.message)
    return CheckResult(
        Condition.RUNTIME_ERROR,
        f"running it fails: {error.kind.rpartition('.')[2]}: {error.message.splitlines()[0]}",
        phase=_phase_of(error.phase),
        error=str(error),
        signature=f"{error.kind}: {words}",
    )


def _describe_crash(end: WorkerCrashed) -> CheckResult:
    return CheckResult(
        Condition.CRASH,
        f"the process died ({end.end}) while {_name_phase(end.phase)}",
        phase=_phase_of(end.phase),
        error=end.end,
        signature=f"{end.end}, {end.phase}",
    )


def _describe_hang(end: WorkerHung) -> CheckResult:
    return CheckResult(
        Condition.HANG,
        f"{_name_phase(end.phase)} made no progress for {end.seconds:.0f} s",
        phase=_phase_of(end.phase),
        signature=end.phase,
    )


def _name_phase(phase: str) -> str:
    names = {"running": "running forward", "backward": "running backward", "": "starting"}
    return names.get(phase, phase)


def _phase_of(phase: str) -> Phase:
    return Phase.BACKWARD if "backward" in phase else Phase.FORWARD


@final
class ProgressReporter:
    """Shows the current task and the number of queries, if there is a terminal."""

    def __init__(self, progress: Progress | None, budget: int) -> None:
        self._progress = progress
        self._budget = budget
        self._task: TaskID | None = None
        if progress is not None:
            self._task = progress.add_task("starting", total=budget, left="")
        self._num_queries = 0
        self._began = time.monotonic()

    def show_task(self, what: str) -> None:
        """Show what is being done now."""
        self._update(description=what)

    def show_num_queries(self, num_queries: int) -> None:
        """Show how often the backend has been called."""
        self._num_queries = num_queries
        self._update(completed=num_queries)

    def expect(self, num_left: int) -> None:
        """Show how many more calls the search expects."""
        pace = (time.monotonic() - self._began) / max(1, self._num_queries)
        total = min(self._budget, self._num_queries + num_left)
        self._update(total=total, left=f"about {pace * num_left:,.0f} s left")

    def _update(self, **changes: object) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, **changes)  # type: ignore[arg-type]


@contextmanager
def shown_progress(budget: int) -> Iterator[ProgressReporter]:
    """A context with a progress bar on standard error, if that is a terminal."""
    # Importing rich draws a random number, so it is imported after random state is preserved.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield ProgressReporter(None, budget)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.completed:.0f} of at most {task.total:.0f} compilations"),
        TextColumn("{task.fields[left]}", style="dim"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield ProgressReporter(progress, budget)
