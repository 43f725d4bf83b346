"""What one trial of a compiler gave, and when two trials failed in the same way."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import final

from shardscope.record import Condition, Deviation, Phase

__all__ = ["Outcome", "make_signature"]

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_NUMBER = re.compile(r"\d+")


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


def make_signature(error: BaseException) -> str:
    """What an error keeps when the program shrinks: its type and first line, without numbers."""
    text = str(error).strip()
    first = text.splitlines()[0] if text else ""
    plain = _NUMBER.sub("#", _ADDRESS.sub("0x", first))
    return f"{type(error).__module__}.{type(error).__qualname__}: {plain[:200]}"
