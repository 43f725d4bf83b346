"""Reports what the compiler is about to do, so that a crash or hang can be attributed.

The process that compiles reports each phase; the process that waits stores the last one, and
derives the stage from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardscope._torch.aot import AotRun, AotStep, watched_aot
from shardscope._torch.inductor import asked_for_parts
from shardscope.compile.diagnose.accuracy.check_result import Application
from shardscope.compile.diagnose.stage_bisect.attempt import applies_to_graph
from shardscope.compile.diagnose.stage_bisect.bisect import name_application
from shardscope.compile.diagnose.stage_bisect.toggles import StageFinding
from shardscope.record import Phase, Stage

_STAGES = {
    AotStep.TRACING: Stage.AOT,
    AotStep.PARTITIONING: Stage.PARTITION,
}
_DECOMPOSITION = "decomposition of "


@contextmanager
def reported_stages(report_phase: Callable[[str], None]) -> Iterator[None]:
    """Report each step of AOT autograd, and each part of Inductor that is applied in it."""
    aot = AotRun(on_step=lambda step: report_phase(step.value))

    def may_apply(subsystem: str, what: str) -> bool:
        if applies_to_graph(subsystem, aot.step):
            part = name_application(Application(subsystem, what, aot.step))
            report_phase(f"{aot.step.value}: {part}")
        return True

    with watched_aot(aot), asked_for_parts(may_apply):
        yield


def finding_from_last_phase(last_phase: str) -> StageFinding:
    """The stage of a process that crashed or hung after it reported `last_phase`."""
    step, _, part = last_phase.partition(": ")
    aot_step = {member.value: member for member in AotStep}.get(step)
    stage = _STAGES.get(aot_step, Stage.BACKEND) if aot_step is not None else Stage.BACKEND
    if stage is Stage.AOT and part.startswith(_DECOMPOSITION):
        stage = Stage.DECOMPOSITION
    return StageFinding(stage, part=part, phase=_phase_of(step), notes=_explain(part))


def _phase_of(step: str) -> Phase:
    return Phase.BACKWARD if "backward" in step else Phase.FORWARD


def _explain(part: str) -> tuple[str, ...]:
    return ("The part is the last that was begun before the process ended.",) if part else ()
