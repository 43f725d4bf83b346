"""`CheckResult`: how compiled code compares with eager execution, and when failures are equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from shardscope._torch.aot import AotStep
from shardscope.compile.diagnose.worker.harness import plain_words
from shardscope.record import Condition, Deviation, Phase, SuspectOp

NUMBERS = (Condition.WRONG_RESULT, Condition.NAN)
_UNSTABLE = (*NUMBERS, Condition.NONDETERMINISTIC)
_WRAPPERS = (
    "BackendCompilerFailed",
    "InductorError",
    "LoweringException",
    "SubgraphLoweringException",
)


@final
@dataclass(frozen=True)
class Application:
    """A part of the compiler that was applied to a graph: a pass, a decomposition, a lowering."""

    subsystem: str  # as torch's CompilerBisector names it
    what: str
    step: AotStep


@final
@dataclass(frozen=True)
class CompilerLog:
    """What the compiler did during a check that was observed; empty if the process died."""

    is_complete: bool = False  # the check was observed to its end
    num_graphs: int = 0  # that AOT autograd received
    is_inductor: bool = False
    applications: tuple[Application, ...] = ()  # requested, whether enabled or not
    kernels: tuple[tuple[AotStep, str], ...] = ()  # that Inductor wrote
    partition: str = ""  # function that splits the joint graph into forward and backward
    ops: tuple[tuple[str, str], ...] = ()  # in the failing direction: node name and op
    changed_op: str = ""  # op of forward or backward that differs from the joint graph

    def applied(self, subsystems: frozenset[str]) -> list[Application]:
        """The applications of these subsystems, in order."""
        return [
            application for application in self.applications if application.subsystem in subsystems
        ]


@final
@dataclass(frozen=True)
class CheckResult:
    """How a compiled subgraph or function compares with eager execution.

    A worker that crashes or hangs while it checks is described by a result, too.
    """

    condition: Condition
    fact: str = ""
    phase: Phase = Phase.FORWARD  # where it shows first
    error: str = ""  # type and message of the error that was raised, or the signal
    signature: str = ""  # of an error: see make_signature
    deviation: Deviation | None = None
    hints: tuple[str, ...] = ()  # names of nodes that probably cause it
    suspects: tuple[SuspectOp, ...] = ()  # of an error: the line that raised it, and the op
    notes: tuple[str, ...] = ()  # what could not be compared
    log: CompilerLog = CompilerLog()  # recorded while the stage is bisected

    @property
    def is_bad(self) -> bool:
        """Whether the user should act on it."""
        return self.condition.is_bad

    def is_same(self, outcome: CheckResult) -> bool:
        """Whether both are the same failure: equal condition, phase and, for errors, signature."""
        return (self.condition, self.phase, self.signature) == (
            outcome.condition,
            outcome.phase,
            outcome.signature,
        )


def is_same_failure(first: CheckResult, second: CheckResult) -> bool:
    """Whether both fail in the same way; wrong numbers and NaN count as the same.

    Wrong numbers may show in different phases: a result may hide what its gradient shows. A program
    that reads uninitialized memory may be correct by coincidence.
    """
    if first.condition in _UNSTABLE and second.condition in _UNSTABLE:
        return True
    return first.is_same(second)


def make_signature(error: BaseException) -> str:
    """What an error has in common in a smaller program: its cause's type and its message.

    Numbers, shapes, and names that the user chose are removed from the message.
    """
    error = find_cause(error)
    return f"{type(error).__module__}.{type(error).__qualname__}: {plain_words(message_of(error))}"


def message_of(error: BaseException) -> str:
    """The message of an error; empty if it cannot be formatted."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - `__str__` of a user's error may raise anything
        return ""


def find_cause(error: BaseException) -> BaseException:
    """The original error inside the errors that compilers wrap around it."""
    while type(error).__name__ in _WRAPPERS:
        inner = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
        if not isinstance(inner, BaseException):
            break
        error = inner
    return error
