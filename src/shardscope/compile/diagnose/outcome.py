"""What one trial of a compiler gave, and when two trials failed in the same way."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import final

from shardscope.record import Condition, Deviation, Phase

__all__ = ["NUMBERS", "Outcome", "find_cause", "is_alike", "make_signature"]

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_QUOTED = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"|`[^`\n]*`")
_NAME = re.compile(r"%\w+|\b([a-zA-Z]\w*?)(?:_\d+)+\b")  # of nodes and buffers: relu_3, %arg0_1
_NUMBER = re.compile(r"\d+(\.\d+)?(e[-+]?\d+)?")
_LIST = re.compile(r"[\[(]#(, ?#)*,?[\])]")  # a shape
NUMBERS = (Condition.WRONG_RESULT, Condition.NAN)
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

    Nor do they have to show in the same phase: a result may hide what its gradient shows.
    """
    if one.condition in NUMBERS and other.condition in NUMBERS:
        return True
    return one.is_same(other)


def make_signature(error: BaseException) -> str:
    """What an error keeps when the program shrinks: its cause's type and what it says.

    Without numbers, shapes, and names that somebody gave.
    """
    error = find_cause(error)
    plain = _ADDRESS.sub("0x", _find_line(str(error).strip()))
    plain = _NAME.sub(lambda found: found[1] or "%", _QUOTED.sub("'…'", plain))
    plain = _LIST.sub("[#]", _NUMBER.sub("#", plain))
    return f"{type(error).__module__}.{type(error).__qualname__}: {plain[:200]}"


def find_cause(error: BaseException) -> BaseException:
    """The error that compilers wrapped theirs around."""
    while type(error).__name__ in _WRAPPERS:
        inner = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
        if not isinstance(inner, BaseException):
            break
        error = inner
    return error


def _find_line(text: str) -> str:
    """The line that says what is wrong: of a C++ compiler's words the first error."""
    lines = text.splitlines() or [""]
    return next((line for line in lines if " error: " in line), lines[0])
