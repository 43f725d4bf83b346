"""Trials of a compiler with parts of it switched off or replaced: does it still fail so?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, final

from shardscope._torch.aot_stages import AotRun, AotStep, watched_aot
from shardscope._torch.compiler_parts import (
    asked_for_parts,
    generated_code,
    inductor_settings,
    without_caches,
)
from shardscope.compile.diagnose.compiler import Compiler
from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.outcome import Outcome
from shardscope.record import Condition

__all__ = [
    "DECOMPOSITIONS",
    "LOWERINGS",
    "PASSES",
    "Application",
    "Judge",
    "Switches",
    "Trial",
    "Trials",
    "fails_alike",
    "find_first",
    "is_aots",
]

Judge = Callable[[Fragment, Compiler], Outcome]

DECOMPOSITIONS = frozenset({"decomposition"})
PASSES = frozenset({"pre_grad_passes", "joint_graph_passes", "post_grad_passes"})
LOWERINGS = frozenset({"lowerings"})

_SIGN_OF_INDUCTOR = "pre_grad_graph"  # asked once per graph; without it there is no Inductor
_NUMBERS = (Condition.WRONG_RESULT, Condition.NAN, Condition.NONDETERMINISTIC)


@final
@dataclass(frozen=True)
class Application:
    """One time that the compiler applied one of its parts."""

    subsystem: str
    what: str
    step: AotStep


@final
@dataclass(frozen=True)
class Switches:
    """Which parts of the compiler may do their work."""

    off: frozenset[str] = frozenset()  # subsystems
    limited: frozenset[str] = frozenset()  # subsystems of which the first `limit` applications may
    limit: int = 0


@final
@dataclass
class Trial:
    """One trial, and what was seen of it."""

    aot: AotRun
    switches: Switches
    applications: list[Application] = field(default_factory=list)
    sources: list[tuple[AotStep, str]] = field(default_factory=list)  # modules Inductor wrote
    outcome: Outcome | None = None
    is_inductor: bool = False
    num_limited: int = 0

    def may_apply(self, subsystem: str, what: str) -> bool:
        """Answer for a part that is about to be applied."""
        if subsystem == _SIGN_OF_INDUCTOR:
            self.is_inductor = True
            return True
        if not is_aots(subsystem, self.aot.step):
            return True
        self.applications.append(Application(subsystem, what, self.aot.step))
        if subsystem in self.switches.limited:
            self.num_limited += 1
            return self.num_limited <= self.switches.limit
        return subsystem not in self.switches.off

    def keep_source(self, source: str) -> None:
        """Keep what Inductor wrote."""
        self.sources.append((self.aot.step, source))

    def applied(self, subsystems: frozenset[str]) -> list[Application]:
        """The applications of some subsystems, in order."""
        return [one for one in self.applications if one.subsystem in subsystems]


def is_aots(subsystem: str, step: AotStep) -> bool:
    """Whether a part is applied to the graph, and not to what a pass traces for itself."""
    return subsystem not in DECOMPOSITIONS or step is AotStep.TRACING


@final
class Trials:
    """Trials of one fragment and one compiler, which fail in a known way."""

    def __init__(
        self, fragment: Fragment, compiler: Compiler, *, failure: Outcome, judge: Judge
    ) -> None:
        self.fragment = fragment
        self.compiler = compiler
        self.failure = failure
        self.num_queries = 0
        self._judge = judge

    def run(
        self, aot: AotRun, switches: Switches | None = None, settings: Mapping[str, Any] = {}
    ) -> Trial:
        """Compile and run the fragment, nothing of it from a cache."""
        trial = Trial(aot, switches or Switches())
        with ExitStack() as stack:
            stack.enter_context(watched_aot(aot))
            stack.enter_context(asked_for_parts(trial.may_apply))
            # One that compiles nothing with Inductor need not load it, which takes seconds.
            if aot.has_own_compilers and settings:
                stack.enter_context(inductor_settings(**settings))
                stack.enter_context(generated_code(trial.keep_source))
            stack.enter_context(without_caches())
            self.num_queries += 1
            trial.outcome = self._judge(self.fragment, self.compiler)
        return trial

    def fails(self, trial: Trial) -> bool:
        """Whether a trial failed as the fragment does."""
        return trial.outcome is not None and fails_alike(trial.outcome, self.failure)

    def fails_elsewhere(self, compiler: Compiler) -> bool:
        """Whether another compiler fails on the fragment in the same way."""
        self.num_queries += 1
        return fails_alike(self._judge(self.fragment, compiler), self.failure)


def fails_alike(one: Outcome, other: Outcome) -> bool:
    """Whether both are one failure; numbers that are wrong may be so in different ways."""
    both = {one.condition, other.condition}
    return one.is_same(other) or (both <= set(_NUMBERS) and one.phase is other.phase)


def find_first(fails: Callable[[int], bool], count: int) -> int:
    """The smallest limit that fails, where `count` does and 0 does not."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(middle) else (middle, high)
    return high
