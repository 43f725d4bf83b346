"""Checks with parts of the compiler disabled or replaced, and the stage that they lead to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

from shardscope.compile.diagnose.accuracy.check_result import Application, CheckResult
from shardscope.record import Condition, Phase, Stage

DECOMPOSITIONS = frozenset({"decomposition"})
PASSES = frozenset({"pre_grad_passes", "joint_graph_passes", "post_grad_passes"})
LOWERINGS = frozenset({"lowerings"})

_NUMBERS = {Condition.WRONG_RESULT, Condition.NAN, Condition.NONDETERMINISTIC}
_DEATHS = (Condition.CRASH, Condition.HANG)
_MAX_APPLICATIONS = 1 << 16


@final
@dataclass(frozen=True)
class StageToggles:
    """Which parts of the compiler are enabled in an attempt."""

    has_own_partition: bool = True  # otherwise torch's default partitioner
    has_own_compilers: bool = True  # otherwise graphs run uncompiled
    off: frozenset[str] = frozenset()  # disabled subsystems
    limited: frozenset[str] = frozenset()  # subsystems with at most `limit` applications
    limit: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)  # Inductor's
    apart: tuple[str, ...] | None = None  # ops that are compiled, each alone; the rest is not
    backend: str | None = None  # a backend to use instead
    wants_ops: bool = False  # list the ops that AOT autograd passes to the failing compiler
    wants_changed_op: bool = False  # compare forward and backward with the joint graph


Ask = Callable[[StageToggles], CheckResult]
"""Checks the failing subgraph with these toggles; the result has a log."""


@final
class StageBisector:
    """Bisects a known failure over attempts with different toggles."""

    def __init__(self, failure: CheckResult, ask: Ask) -> None:
        self.failure = failure
        self.num_queries = 0
        self._ask = ask

    def ask(self, toggles: StageToggles) -> CheckResult:
        """The result of a check with these toggles."""
        self.num_queries += 1
        return self._ask(toggles)

    def has_same_failure(self, result: CheckResult) -> bool:
        """Whether a check failed in the same way as the known failure."""
        return fails_the_same_way(result, self.failure)

    def fails(self, toggles: StageToggles) -> bool:
        """Whether an attempt with these toggles fails in the same way."""
        return self.has_same_failure(self.ask(toggles))

    def find_first(
        self, toggles: StageToggles, subsystems: frozenset[str], *, unlimited: CheckResult
    ) -> Application | None:
        """The first application with which it fails, if it passes without any and fails with all.

        `unlimited` is the result with all applications enabled; if the process died, their number
        is unknown.
        """
        results: dict[int, CheckResult] = {}

        def fails(limit: int) -> bool:
            results[limit] = self.ask(replace(toggles, limited=subsystems, limit=limit))
            return self.has_same_failure(results[limit])

        applications = unlimited.log.applied(subsystems)
        low, high = (0, len(applications)) if applications else _gallop(fails)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fails(middle) else (middle, high)
        if not applications and low not in results:
            fails(low)
        # The first application that was disabled in the last attempt that passed.
        applied = applications or results[low].log.applied(subsystems)
        return applied[high - 1] if 0 < high <= len(applied) else None


def _gallop(fails: Callable[[int], bool]) -> tuple[int, int]:
    """Two limits of which only the higher one fails."""
    low, high = 0, 1
    while high < _MAX_APPLICATIONS and not fails(high):
        low, high = high, high * 2
    return low, high


def is_by_numbers(outcome: CheckResult) -> bool:
    """Whether a compiled program finished with wrong numbers."""
    return outcome.condition in _NUMBERS


def fails_the_same_way(first: CheckResult, second: CheckResult) -> bool:
    """Whether both are the same failure; wrong numbers may be wrong in different ways."""
    conditions = {first.condition, second.condition}
    if conditions <= _NUMBERS:
        return first.phase is second.phase
    is_death = first.condition is second.condition and first.condition in _DEATHS
    return is_death or (first.is_bad and first.is_same(second))


@final
@dataclass(frozen=True)
class StageFinding:
    """The stage that causes a failure, and the part of it if it is known."""

    stage: Stage
    part: str = ""
    phase: Phase | None = None
    notes: tuple[str, ...] = ()
