"""Records of `diagnose`: whether a compiled function agrees with eager, and if not, the cause."""

from __future__ import annotations

from enum import StrEnum

from shardscope.record.base import Record
from shardscope.record.ranks import Natural, Rank
from shardscope.record.source import Phase, Source


class Condition(StrEnum):
    """How a compiled function compares with eager execution."""

    FINE = "fine"
    MORE_ACCURATE = "more_accurate"  # it differs, and is nearer to double precision
    RNG = "rng"  # it differs in what is drawn at random, and in nothing else
    NONDETERMINISTIC = "nondeterministic"  # run again, it gives something else
    WRONG_RESULT = "wrong_result"
    NAN = "nan"  # NaN or infinity where the function has none, or none where it has
    COMPILE_ERROR = "compile_error"
    RUNTIME_ERROR = "runtime_error"
    MISSING_ERROR = "missing_error"  # the function raises an error, and the compiled one returns
    DIFFERENT_ERROR = "different_error"  # both raise, and not the same
    CRASH = "crash"  # the process died
    HANG = "hang"

    @property
    def is_bad(self) -> bool:
        """Whether the user should act on it."""
        return self not in (Condition.FINE, Condition.MORE_ACCURATE, Condition.RNG)


class Stage(StrEnum):
    """The stages of the compiler, in order."""

    DYNAMO = "dynamo"
    AOT = "aot"
    DECOMPOSITION = "decomposition"
    PARTITION = "partition"
    BACKEND = "backend"


class Deviation(Record, frozen=True, kw_only=True, gc=False):
    """The error of one tensor, relative to the magnitude of the exact result."""

    tensor: str  # output 0, gradient of input 2, …
    relative_rmse: float  # of the compiled result, against double precision
    eager_rmse: float  # of eager execution
    max_ulp: float  # largest distance from eager, in units of the last place
    worst_index: tuple[Natural, ...] = ()
    expected: float | None = None  # there, in double precision
    got: float | None = None


class SuspectOp(Record, frozen=True, kw_only=True, gc=False):
    """One op of the smallest program that still fails."""

    op: str  # torch.relu, Tensor.relu, aten.relu.default, …
    module: str | None = None
    source: Source | None = None


class Diagnosis(Record, frozen=True, kw_only=True, gc=False):
    """The result of `diagnose` for one function and one backend."""

    rank: Rank
    target: str
    backend: str
    condition: Condition
    fact: str  # a sentence
    num_graphs: Natural = 0
    num_queries: Natural = 0  # times that the backend was called
    graph: Natural | None = None  # the one that fails
    stage: Stage | None = None
    part: str = ""  # the pass, lowering or kernel of the backend
    phase: Phase | None = None  # forward or backward
    suspects: tuple[SuspectOp, ...] = ()
    is_minimal: bool = False  # without any one of the suspects it does not fail
    deviation: Deviation | None = None
    error: str = ""
    repro: str = ""  # path of the script
    script: str = ""  # its text, unless that is very long
    is_verified: bool = False  # a fresh process showed the same failure
    passing: str = ""  # the nearby variant that does not fail
    notes: tuple[str, ...] = ()  # what could not be found out, and why
