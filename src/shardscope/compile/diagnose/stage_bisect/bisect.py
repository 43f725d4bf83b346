"""Finds the stage of the compiler that causes a failure, and the part of Inductor: a pass, a
lowering, a setting or a kernel.

The same subgraph is checked with different parts of the compiler disabled (`StageToggles`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

from shardscope.compile.diagnose.accuracy import Application, CheckResult, CompilerLog
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


_CUDAGRAPHS = frozenset({"cudagraphs"})
# Settings that bring Inductor closer to eager execution; tried one after the other.
_CAREFUL = {
    "fallback_random": True,
    "emulate_precision_casts": True,
    "layout_optimization": False,
    "comprehensive_padding": False,
}
_KINDS = {
    "decomposition": "decomposition of {}",
    "pre_grad_passes": "pre-grad pass {!r}",
    "joint_graph_passes": "joint-graph pass {!r}",
    "post_grad_passes": "post-grad pass {!r}",
    "lowerings": "lowering of {}",
    "cudagraphs": "CUDA graphs",
}
# Kernels are named after the lowered ops, so that an op can be matched with its kernel.
_NAMED = {"cpp.descriptive_names": "inductor_node", "triton.descriptive_names": "inductor_node"}

_LocatedPart = tuple[str, tuple[str, ...]]


def name_application(application: Application) -> str:
    """The name of an applied part in reports, for example "lowering of aten.mul"."""
    form = _KINDS.get(application.subsystem, f"{application.subsystem} {{}}")
    return form.format(application.what).strip()


def locate_in_inductor(bisector: StageBisector) -> _LocatedPart:
    """The part of Inductor that causes the failure, with notes; the backend is known to cause
    it.
    """
    unlimited = bisector.ask(StageToggles(settings=_NAMED))
    if not bisector.has_same_failure(unlimited):
        return "", ("It does not fail when Inductor's caches are off: what it runs may be stale.",)
    careful = StageToggles(off=_CUDAGRAPHS, settings=_NAMED | _CAREFUL)
    unlowered = replace(careful, off=_CUDAGRAPHS | LOWERINGS)
    passed = bisector.ask(unlowered)
    if bisector.has_same_failure(passed):
        return _locate_pass(bisector, unlowered, passed)
    lowered = bisector.ask(careful)
    if bisector.has_same_failure(lowered):
        return _locate_lowering(bisector, careful, lowered)
    return _locate_setting(bisector)


def _locate_pass(
    bisector: StageBisector, unlowered: StageToggles, unlimited: CheckResult
) -> _LocatedPart:
    if bisector.fails(replace(unlowered, limited=PASSES, limit=0)):
        return "", ("It fails with all passes and lowerings of Inductor off.",)
    application = bisector.find_first(unlowered, PASSES, unlimited=unlimited)
    return (name_application(application) if application else "", ())


def _locate_lowering(
    bisector: StageBisector, careful: StageToggles, unlimited: CheckResult
) -> _LocatedPart:
    application = bisector.find_first(careful, LOWERINGS, unlimited=unlimited)
    if application is None:
        return "", ()
    kernels = _kernels_of(application, unlimited.log)
    where = f", in kernel {' or '.join(kernels)}" if kernels else ""
    return name_application(application) + where, ()


def _kernels_of(lowering: Application, log: CompilerLog) -> list[str]:
    """The kernels that are named after the op, in the direction in which it was lowered."""
    op = re.escape(lowering.what.split(".")[1])
    named = [
        name
        for step, name in log.kernels
        if step is lowering.step and re.search(rf"_{op}(_|$)", name)
    ]
    return list(dict.fromkeys(named))  # the check may have compiled more than once


def _locate_setting(bisector: StageBisector) -> _LocatedPart:
    careful = StageToggles(settings=_NAMED | _CAREFUL)
    if bisector.fails(careful):
        return "CUDA graphs", ()
    for name, value in _CAREFUL.items():
        settings = {key: setting for key, setting in careful.settings.items() if key != name}
        if bisector.fails(replace(careful, settings=settings)):
            return f"setting {name} = {not value}", (f"With {name} = {value} it is correct.",)
    return "", (
        (f"It is correct with all of {', '.join(_CAREFUL)} set, but not with any single one."),
    )


_EAGER = StageToggles(has_own_compilers=False, wants_ops=True)
_SPLIT = StageToggles(has_own_compilers=False, wants_changed_op=True, off=PASSES)
_TRACED = StageToggles(has_own_compilers=False, has_own_partition=False, off=PASSES)
_BARE = replace(_TRACED, off=PASSES | DECOMPOSITIONS)


def locate_stage(ask: Ask, *, outcome: CheckResult) -> StageFinding:
    """Find the stage with checks that `ask` runs by `check_with_parts_disabled`.

    For a check that killed its process, `ask` returns a result without a log.
    """
    bisector = StageBisector(outcome, ask)
    eager = bisector.ask(_EAGER)
    if eager.log.is_complete and not eager.log.num_graphs:
        finding = StageFinding(
            Stage.BACKEND, notes=("The backend does not get as far as AOT autograd.",)
        )
    elif bisector.has_same_failure(eager):
        finding = _locate_before_compilers(bisector, eager)
    else:
        finding = _locate_in_backend(bisector, eager)
    return replace(finding, phase=outcome.phase)


def _locate_before_compilers(bisector: StageBisector, eager: CheckResult) -> StageFinding:
    """Locate a failure that shows although no graph is compiled by the backend."""
    traced = bisector.ask(_TRACED)
    if bisector.has_same_failure(traced):
        return _locate_in_tracing(bisector, traced)
    split = bisector.ask(_SPLIT)
    if bisector.has_same_failure(split):
        op, partition = split.log.changed_op, split.log.partition
        part = f"{op}, in {partition}" if op else partition
        return StageFinding(Stage.PARTITION, part=part)
    # It is correct without its pre-grad and joint-graph passes.
    application = bisector.find_first(replace(_EAGER, wants_ops=False), PASSES, unlimited=eager)
    return StageFinding(Stage.BACKEND, part=name_application(application) if application else "")


def _locate_in_tracing(bisector: StageBisector, traced: CheckResult) -> StageFinding:
    if not bisector.fails(_BARE):
        application = bisector.find_first(_TRACED, DECOMPOSITIONS, unlimited=traced)
        return StageFinding(
            Stage.DECOMPOSITION, part=name_application(application) if application else ""
        )
    if bisector.fails(StageToggles(backend="aot_eager")):
        return StageFinding(Stage.AOT)
    note = (
        "AOT autograd alone is correct: the backend changes the graph before it, or the result "
        "after it."
    )
    return StageFinding(Stage.BACKEND, part="outside of AOT autograd", notes=(note,))


def _locate_in_backend(bisector: StageBisector, eager: CheckResult) -> StageFinding:
    part, notes = locate_in_inductor(bisector) if eager.log.is_inductor else ("", ())
    return StageFinding(Stage.BACKEND, part=part or _find_op(bisector, eager), notes=notes)


def _find_op(bisector: StageBisector, eager: CheckResult) -> str:
    """The op that fails when the backend compiles each op alone; "" if none fails."""
    ops = eager.log.ops
    if len(ops) <= 1:
        return ops[0][1] if ops else ""
    names = tuple(name for name, _ in ops)
    if not bisector.fails(StageToggles(apart=names)):
        return ""
    low, high = 0, len(ops)
    while high - low > 1:
        middle = (low + high) // 2
        is_within = bisector.fails(StageToggles(apart=names[low:middle]))
        low, high = (low, middle) if is_within else (middle, high)
    return ops[low][1]
