"""A diagnosis as a recording, with what to do about it."""

from __future__ import annotations

from collections.abc import Iterator

from shardscope.comm.run import describe_run, find_torch_gaps
from shardscope.record import Condition, Diagnosis, Finding, Recording, Severity, Stage

__all__ = ["make_recording"]

_MEANWHILE = {
    Stage.DYNAMO: ", and keep the function out of the compiler with @torch.compiler.disable "
    "until it is fixed.",
    Stage.AOT: "; rewriting the op may avoid it.",
    Stage.DECOMPOSITION: "; rewriting the op, so that it is decomposed differently, may avoid it.",
    Stage.PARTITION: "; under torch.no_grad() nothing is partitioned.",
}
_UNLOCATED = "; backend={} may help until it is fixed."


def make_recording(diagnosis: Diagnosis, *, world_size: int = 1) -> Recording:
    """A recording of this diagnosis alone."""
    return Recording(
        run=describe_run(diagnosis.rank, world_size, (), instrument="diagnose"),
        diagnoses=(diagnosis,),
        findings=tuple(_find_problems(diagnosis)),
        gaps=find_torch_gaps(diagnosis.rank),
    )


def _find_problems(diagnosis: Diagnosis) -> Iterator[Finding]:
    if not diagnosis.condition.is_bad:
        return
    is_doubtful = diagnosis.condition is Condition.NONDETERMINISTIC
    yield Finding(
        rule=f"compiled-{diagnosis.condition.replace('_', '-')}",
        severity=Severity.WARNING if is_doubtful else Severity.ERROR,
        subject=_name_subject(diagnosis),
        fact=diagnosis.fact,
        remedy=_suggest(diagnosis),
        rank=diagnosis.rank,
        source=diagnosis.suspects[0].source if diagnosis.suspects else None,
    )


def _name_subject(diagnosis: Diagnosis) -> str:
    ops = ", ".join(dict.fromkeys(one.op for one in diagnosis.suspects[:3]))
    return (
        f"{ops} under {diagnosis.backend}" if ops else f"{diagnosis.target} ({diagnosis.backend})"
    )


def _suggest(diagnosis: Diagnosis) -> str:
    report = "Report it with the repro" if diagnosis.repro else "Report it"
    return report + _say_meanwhile(diagnosis)


def _say_meanwhile(diagnosis: Diagnosis) -> str:
    if diagnosis.stage is None:
        return _name_simpler(diagnosis.backend)
    what = "op" if len(diagnosis.suspects) == 1 else "ops"
    disabled = f", and keep the {what} out of the compiler with @torch.compiler.disable until "
    return _MEANWHILE.get(diagnosis.stage, f"{disabled}{diagnosis.backend} is fixed.")


def _name_simpler(backend: str) -> str:
    """Backends that do less than this one."""
    if backend == "eager":
        return "."
    return _UNLOCATED.format("'eager'" if backend == "aot_eager" else "'aot_eager' or 'eager'")
