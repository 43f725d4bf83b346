"""Asks the worker what the compiler makes of fragments; counts, remembers, survives the worst."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, final

from shardscope.compile.diagnose.at_bench import Loaded, Piece, check, load, recall
from shardscope.compile.diagnose.blaming.switching import Report
from shardscope.compile.diagnose.compiler import Compiler
from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.isolation.fragment_form import describe_fragment
from shardscope.compile.diagnose.isolation.workers import PREPARING, STARTING, Workers
from shardscope.compile.diagnose.outcome import Outcome
from shardscope.compile.diagnose.repro.harness import plain_words
from shardscope.errors import (
    CompileError,
    RemoteError,
    ShardscopeError,
    WorkerCrashed,
    WorkerHung,
)
from shardscope.record import Condition, Phase

__all__ = ["RUNNING", "Patience", "Queries", "is_of_device"]

ResultT = TypeVar("ResultT")

_SURELY_S = 2.0  # that a run may take however short eager execution is
_AT_FIRST_S = 10.0
_TIMES_EAGER = 20.0
RUNNING = ("running", "backward", "running forward", "running backward")
"""Phases in which what was compiled is run."""


@final
@dataclass(frozen=True)
class Patience:
    """How long a compiler may take."""

    compile_s: float

    def run_s(self, eager_s: float, *, is_hang_known: bool) -> float:
        """Seconds that what it made may take; fewer once a hang has been seen."""
        return (_SURELY_S if is_hang_known else _AT_FIRST_S) + _TIMES_EAGER * eager_s

    def limits(self, run_s: float) -> dict[str, float]:
        """Seconds for each phase of a trial."""
        return {"": max(self.compile_s, run_s), **dict.fromkeys(RUNNING, run_s)}


@final
class Queries:
    """Trials of one compiler on the fragments of one function."""

    def __init__(
        self,
        workers: Workers,
        compiler: Compiler,
        patience: Patience,
        tell: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.num_calls = 0  # of the backend
        self.last_phase = ""  # of a process that died
        self._workers = workers
        self._compiler = compiler
        self._patience = patience
        self._tell = tell
        self._loaded: dict[int, Loaded] = {}
        self._known: dict[Piece, Outcome] = {}
        self._has_hung = False

    def load(self, key: int, fragment: Fragment) -> Loaded:
        """Give the worker a fragment, and every worker after it.

        Raises CompileError if it cannot be sent, or not be run eagerly op by op.
        """
        form, name = describe_fragment(fragment), f"fragment {key}"
        self._workers.prepare(load, key, form, name=name)
        try:
            self._loaded[key] = self._workers.call(recall, key)
        except CompileError:
            self._workers.forget(name)
            raise
        return self._loaded[key]

    def ask(self, piece: Piece) -> Outcome:
        """What the compiler makes of a piece."""
        if piece.keep is not None and len(piece.keep) == len(self._loaded[piece.key].ops):
            piece = Piece(piece.key)
        if piece not in self._known:
            self._known[piece] = self.run(check, piece, self._compiler)
        return self._known[piece]

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        num_calls: int = 1,
        limit_s: float | None = None,
    ) -> Any:
        """Call what calls the backend, at the bench; the end of its process is an outcome.

        `limit_s` replaces the limits of a trial's phases. Raises CompileError for what is not the
        backend's doing, BackendError for bad options.
        """
        self.count(num_calls)
        limits = self._patience.limits(self.run_s) if limit_s is None else limit_s
        try:
            told = self._workers.call(function, *args, limits=limits)
            outcome = told.outcome if isinstance(told, Report) else told
            if isinstance(outcome, Outcome) and is_of_device(outcome.error):
                self._workers.discard()
            return told
        except RemoteError as error:
            if isinstance(error.__cause__, ShardscopeError):  # said on purpose: it is for the user
                raise error.__cause__ from None
            if not is_of_device(str(error)):
                raise
            self._workers.discard()
            return _describe_device_error(error)
        except (WorkerCrashed, WorkerHung) as end:
            if end.phase in (STARTING, PREPARING):  # which is not the backend's doing
                raise
            self._expect_more(end.phase)
            if isinstance(end, WorkerHung):
                self._has_hung = True
                return _describe_hang(end)
            return _describe_crash(end)

    def _expect_more(self, phase: str) -> None:
        self.last_phase = phase
        self._workers.keep_standby()

    def look(self, function: Callable[..., ResultT], *args: Any) -> ResultT:
        """Call a function at the bench that leaves the backend alone.

        Whoever interrupts wants what was found so far, so one interrupt does not end it.
        """
        try:
            return self._workers.call(function, *args)
        except KeyboardInterrupt:
            return self._workers.call(function, *args)

    def count(self, num_calls: int) -> None:
        """The backend is called so many times more."""
        self.num_calls += num_calls
        if num_calls:
            self._tell(self.num_calls)

    @property
    def run_s(self) -> float:
        """Seconds that what the compiler made may take."""
        eager_s = max((one.eager_s for one in self._loaded.values()), default=1.0)
        return self._patience.run_s(eager_s, is_hang_known=self._has_hung)


def is_of_device(error: str) -> bool:
    """Whether an error leaves the device unusable to the process that made it."""
    return "CUDA error" in error or "AcceleratorError" in error


def _describe_device_error(error: RemoteError) -> Outcome:
    words = plain_words(error.message)
    return Outcome(
        Condition.RUNTIME_ERROR,
        f"running it fails: {error.kind.rpartition('.')[2]}: {error.message.splitlines()[0]}",
        phase=_phase_of(error.phase),
        error=str(error),
        signature=f"{error.kind}: {words}",
    )


def _describe_crash(end: WorkerCrashed) -> Outcome:
    return Outcome(
        Condition.CRASH,
        f"the process died ({end.end}) while {_name_phase(end.phase)}",
        phase=_phase_of(end.phase),
        error=end.end,
        signature=f"{end.end}, {end.phase}",
    )


def _describe_hang(end: WorkerHung) -> Outcome:
    return Outcome(
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
