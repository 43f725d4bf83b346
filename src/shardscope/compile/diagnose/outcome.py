"""What one trial of a compiler gave, and when two trials failed in the same way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from shardscope.compile.diagnose.repro.harness import plain_words
from shardscope.record import Condition, Deviation, Phase, SuspectOp

__all__ = ["NUMBERS", "Outcome", "find_cause", "is_alike", "make_signature", "message_of"]

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
class Outcome:
    """How a compiled fragment or program compares with the eager one."""

    condition: Condition
    fact: str = ""
    phase: Phase = Phase.FORWARD  # where it shows first
    error: str = ""  # type and message of what was raised, or the signal
    signature: str = ""  # of an error: see make_signature
    deviation: Deviation | None = None
    hints: tuple[str, ...] = ()  # names of nodes that may be to blame
    suspects: tuple[SuspectOp, ...] = ()  # of an error: the line that raised it, and the op
    notes: tuple[str, ...] = ()  # what could not be compared

    @property
    def is_bad(self) -> bool:
        """Whether somebody should act on it."""
        return self.condition.is_bad

    def is_same(self, other: Outcome) -> bool:
        """Whether both are the same failure: the same kind, phase and, of errors, origin."""
        return (self.condition, self.phase, self.signature) == (
            other.condition,
            other.phase,
            other.signature,
        )


def is_alike(one: Outcome, other: Outcome) -> bool:
    """Whether both fail in the same way; wrong numbers may turn into NaN on their way, or back.

    Nor do they have to show in the same phase: a result may hide what its gradient shows. What
    reads memory that holds anything may be right once in a while.
    """
    if one.condition in _UNSTABLE and other.condition in _UNSTABLE:
        return True
    return one.is_same(other)


def make_signature(error: BaseException) -> str:
    """What an error keeps when the program shrinks: its cause's type and what it says.

    Without numbers, shapes, and names that somebody gave.
    """
    error = find_cause(error)
    return f"{type(error).__module__}.{type(error).__qualname__}: {plain_words(message_of(error))}"


def message_of(error: BaseException) -> str:
    """What an error says; nothing if it cannot say it."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - errors of others may do anything
        return ""


def find_cause(error: BaseException) -> BaseException:
    """The error that compilers wrapped theirs around."""
    while type(error).__name__ in _WRAPPERS:
        inner = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
        if not isinstance(inner, BaseException):
            break
        error = inner
    return error
