"""Trials of a compiler with parts of it switched off or replaced: does it still fail so?

Whoever looks for the stage asks with a `Trial` and is answered with a `Report`; the answer may come
from this process or from another one, which may die of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

from shardscope._torch.aot_stages import AotStep
from shardscope.compile.diagnose.outcome import Outcome
from shardscope.record import Condition

__all__ = [
    "DECOMPOSITIONS",
    "LOWERINGS",
    "PASSES",
    "Application",
    "Ask",
    "Report",
    "Suspicion",
    "Trial",
    "fails_alike",
    "is_by_numbers",
]

DECOMPOSITIONS = frozenset({"decomposition"})
PASSES = frozenset({"pre_grad_passes", "joint_graph_passes", "post_grad_passes"})
LOWERINGS = frozenset({"lowerings"})

_NUMBERS = {Condition.WRONG_RESULT, Condition.NAN, Condition.NONDETERMINISTIC}
_DEATHS = (Condition.CRASH, Condition.HANG)
_MOST_APPLICATIONS = 1 << 16


@final
@dataclass(frozen=True)
class Trial:
    """Which parts of the compiler may do their work."""

    has_own_partition: bool = True  # otherwise torch's plain one
    has_own_compilers: bool = True  # otherwise graphs are run as they are
    off: frozenset[str] = frozenset()  # subsystems
    limited: frozenset[str] = frozenset()  # subsystems of which the first `limit` applications may
    limit: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)  # Inductor's
    apart: tuple[str, ...] | None = None  # ops that are compiled, each alone; the rest is not
    backend: str | None = None  # another one than the suspect
    wants_ops: bool = False  # a list of what AOT autograd hands to the failing compiler
    wants_changed_op: bool = False  # a comparison of forward and backward with the joint graph


@final
@dataclass(frozen=True)
class Application:
    """One time that the compiler applied one of its parts."""

    subsystem: str
    what: str
    step: AotStep


@final
@dataclass(frozen=True)
class Report:
    """What a trial gave. Of a process that died only the outcome is known."""

    outcome: Outcome
    has_died: bool = False
    num_graphs: int = 0  # that AOT autograd was handed
    is_inductor: bool = False
    applications: tuple[Application, ...] = ()  # asked for, granted or not
    kernels: tuple[tuple[AotStep, str], ...] = ()  # that Inductor wrote
    partition: str = ""  # name of the function that cuts forward from backward
    ops: tuple[tuple[str, str], ...] = ()  # in the failing direction: name of node, and op
    changed_op: str = ""  # of forward or backward, which does not compute what the joint graph does

    def applied(self, subsystems: frozenset[str]) -> list[Application]:
        """The applications of some subsystems, in order."""
        return [one for one in self.applications if one.subsystem in subsystems]


Ask = Callable[[Trial], Report]


@final
class Suspicion:
    """A known failure, and trials that tell what it depends on."""

    def __init__(self, failure: Outcome, ask: Ask) -> None:
        self.failure = failure
        self.num_queries = 0
        self._ask = ask

    def ask(self, trial: Trial) -> Report:
        """The report on a trial."""
        self.num_queries += 1
        return self._ask(trial)

    def holds(self, report: Report) -> bool:
        """Whether a trial failed as is known."""
        return fails_alike(report.outcome, self.failure)

    def fails(self, trial: Trial) -> bool:
        """Whether a trial fails as is known."""
        return self.holds(self.ask(trial))

    def find_first(
        self, trial: Trial, subsystems: frozenset[str], *, whole: Report
    ) -> Application | None:
        """The application with which it begins to fail: not without any, but with all.

        `whole` is the report of one that was granted all; if that died, nobody knows how many.
        """
        seen: dict[int, Report] = {}

        def fails(limit: int) -> bool:
            seen[limit] = self.ask(replace(trial, limited=subsystems, limit=limit))
            return self.holds(seen[limit])

        known = whole.applied(subsystems)
        low, high = (0, len(known)) if known else _gallop(fails)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fails(middle) else (middle, high)
        if not known and low not in seen:
            fails(low)
        # The one that was refused first when all was still well.
        applied = known or seen[low].applied(subsystems)
        return applied[high - 1] if 0 < high <= len(applied) else None


def _gallop(fails: Callable[[int], bool]) -> tuple[int, int]:
    """Two limits of which only the higher fails."""
    low, high = 0, 1
    while high < _MOST_APPLICATIONS and not fails(high):
        low, high = high, high * 2
    return low, high


def is_by_numbers(outcome: Outcome) -> bool:
    """Whether something ran to its end and gave the wrong numbers."""
    return outcome.condition in _NUMBERS


def fails_alike(one: Outcome, other: Outcome) -> bool:
    """Whether both are one failure; numbers that are wrong may be so in different ways."""
    both = {one.condition, other.condition}
    if both <= _NUMBERS:
        return one.phase is other.phase
    is_death = one.condition is other.condition and one.condition in _DEATHS
    return is_death or (one.is_bad and one.is_same(other))
