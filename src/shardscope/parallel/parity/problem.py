"""A problem: what a comparison has found, where it is, why, and how to fix it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from shardscope.parallel.parity.explanation import Explanation
from shardscope.record import Phase, Source


@final
@dataclass(frozen=True, eq=False)
class Problem:
    """A cause and its location; `module` is None if it is not in the code of a module."""

    cause: Explanation
    subject: str
    fact: str
    remedy: str
    module: str | None = None
    phase: Phase = Phase.FORWARD
    names: tuple[str, ...] = ()  # tensors that show the problem, if it is not in a module
    rule: str = ""  # if it is not the rule of the cause
    op: str = ""
    source: Source | None = None
