"""What the compiler is about to do, told before it does it: for when its process does not return.

The process that compiles announces; the one that waits for it keeps the last announcement, and
blames from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardscope._torch.aot_stages import AotRun, AotStep, watched_aot
from shardscope._torch.compiler_parts import asked_for_parts
from shardscope.compile.diagnose.blaming.blame import Blame
from shardscope.compile.diagnose.blaming.inductor import name_application
from shardscope.compile.diagnose.blaming.switching import Application
from shardscope.compile.diagnose.blaming.try_out import is_of_the_graph
from shardscope.record import Phase, Stage

__all__ = ["announced", "blame_last"]

_STAGES = {
    AotStep.TRACING: Stage.AOT,
    AotStep.PARTITIONING: Stage.PARTITION,
}
_DECOMPOSITION = "decomposition of "


@contextmanager
def announced(announce: Callable[[str], None]) -> Iterator[None]:
    """Announce each step of AOT autograd, and each part of Inductor that is applied in it."""
    aot = AotRun(on_step=lambda step: announce(step.value))

    def may_apply(subsystem: str, what: str) -> bool:
        if is_of_the_graph(subsystem, aot.step):
            part = name_application(Application(subsystem, what, aot.step))
            announce(f"{aot.step.value}: {part}")
        return True

    with watched_aot(aot), asked_for_parts(may_apply):
        yield


def blame_last(announcement: str) -> Blame:
    """Whom to blame for a process that ended, or did not come back, after an announcement."""
    step, _, part = announcement.partition(": ")
    known = {one.value: one for one in AotStep}.get(step)
    stage = _STAGES.get(known, Stage.BACKEND) if known is not None else Stage.BACKEND
    if stage is Stage.AOT and part.startswith(_DECOMPOSITION):
        stage = Stage.DECOMPOSITION
    return Blame(stage, part=part, phase=_phase_of(step), notes=_explain(part))


def _phase_of(step: str) -> Phase:
    return Phase.BACKWARD if "backward" in step else Phase.FORWARD


def _explain(part: str) -> tuple[str, ...]:
    return ("The part is the last that was begun before the process ended.",) if part else ()
