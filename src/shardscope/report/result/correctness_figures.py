"""Reads figures of correctness and compilation from a recording: parity, parallel programs, op
coverage, graphs and diagnoses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from shardscope.record import (
    Agreement,
    BreakSite,
    Coverage,
    Diagnosis,
    Divergence,
    Explanation,
    Fallback,
    OpCoverage,
    Parallelization,
    Recording,
    RunDeviation,
    TensorTypes,
    TensorVerdict,
    compress_ranks,
    format_ranks,
)
from shardscope.record.base import name_line
from shardscope.record.layer_names import fold_indices
from shardscope.record.parallel_records import FINE, TOLERABLE, Suspect
from shardscope.report.result.figures import (
    BlockerFigures,
    BreakFigures,
    CompilerFigures,
    CoverageFigures,
    DeviationFigures,
    DiagnosisFigures,
    DivergenceFigures,
    FallbackFigures,
    ParallelFigures,
    ParityFigures,
    RecompileFigures,
    RunFigures,
    SkipFigures,
    SuspectFigures,
    TensorFigures,
    TypedTensorFigures,
    TypesFigures,
    read_code,
)
from shardscope.report.text.compiler import fold_explanations
from shardscope.report.text.correctness import summarize_parity, summarize_proof
from shardscope.report.text.heading import name_mesh
from shardscope.report.text.op_coverage import list_blockers, summarize_level
from shardscope.report.text.run_comparison import summarize_comparison
from shardscope.report.text.tensor_types import count_undecided, group_tensors, name_group

_MAX_MODULES = 3
_MAX_HINTS = 2


def read_parity(recording: Recording) -> tuple[ParityFigures, ...]:
    """Read each comparison with a single device."""
    return tuple(
        ParityFigures(
            mesh=name_mesh(parity.axes),
            verdict=summarize_parity(parity, recording.findings).plain,
            num_tensors=len(parity.tensors),
            agreements=dict(Counter(str(tensor.agreement) for tensor in parity.tensors)),
            num_compared_modules=parity.num_compared_modules,
            divergences=tuple(map(_read_divergence, parity.divergences)),
            different=_read_different(parity.tensors, TOLERABLE),
        )
        for parity in recording.parity
    )


def read_runs(recording: Recording) -> tuple[RunFigures, ...]:
    """Read each comparison of two runs."""
    return tuple(
        RunFigures(
            run_a=comparison.run_a,
            run_b=comparison.run_b,
            verdict=summarize_comparison(comparison),
            num_compared=comparison.num_compared,
            num_equal=comparison.num_equal,
            num_deviating=comparison.num_deviating,
            deviations=tuple(map(_read_run_deviation, comparison.deviations)),
            agreed=comparison.agreed,
        )
        for comparison in recording.comparisons
    )


def _read_run_deviation(deviation: RunDeviation) -> DeviationFigures:
    return DeviationFigures(
        step=deviation.step,
        kind=str(deviation.kind),
        name=f"{deviation.name}[{deviation.path}]" if deviation.path else deviation.name,
        call=deviation.call,
        norm_a=deviation.norm_a,
        norm_b=deviation.norm_b,
        sum_a=deviation.sum_a,
        sum_b=deviation.sum_b,
        deviation=deviation.deviation,
        limit=deviation.limit,
        ratio=deviation.ratio,
        detail=deviation.detail,
        ranks=format_ranks(deviation.ranks) if deviation.ranks else "",
        disagreeing_run=deviation.disagreeing_run,
        suspect=deviation.suspect,
    )


def read_types(recording: Recording) -> tuple[TypesFigures, ...]:
    """Read the inferred types of each mesh, with repeated layers folded."""
    return tuple(
        TypesFigures(
            mesh=name_mesh(types.axes),
            num_runs=types.num_runs,
            num_tensors=len(types.tensors),
            num_undecided=count_undecided(types),
            num_declared=types.count_declared()[0],
            num_agreeing=types.count_declared()[1],
            tensors=tuple(map(_read_typed, group_tensors(types.tensors))),
        )
        for types in recording.types
    )


def _read_typed(group: Sequence[TensorTypes]) -> TypedTensorFigures:
    tensor = group[0]
    gradients = {axis.axis: axis.gradient for axis in tensor.axes if axis.gradient is not None}
    return TypedTensorFigures(
        name=name_group(group),
        role=str(tensor.role),
        forward={axis.axis: axis.forward for axis in tensor.axes},
        gradient=gradients,
        repeat=len(group),
    )


def _read_divergence(divergence: Divergence) -> DivergenceFigures:
    return DivergenceFigures(
        module=divergence.module,
        phase=str(divergence.phase),
        suspect=str(divergence.suspect),
        detail=divergence.detail,
        op=divergence.op,
        remedy=divergence.remedy,
        line=name_line(divergence.source),
        code=read_code(divergence.source),
    )


def _read_different(
    tensors: Iterable[TensorVerdict], accepted: frozenset[Agreement]
) -> tuple[TensorFigures, ...]:
    """Read the tensors that differ; those of repeated layers share an entry, the worst of them."""
    groups: dict[object, list[TensorVerdict]] = {}
    for tensor in tensors:
        if tensor.agreement not in accepted:
            name = fold_indices(tensor.name)
            key = (tensor.step, tensor.kind, name, tensor.agreement, tensor.suspect)
            groups.setdefault(key, []).append(tensor)
    return tuple(map(_read_tensor, groups.values()))


def _read_tensor(group: list[TensorVerdict]) -> TensorFigures:
    worst = max(group, key=lambda tensor: tensor.error or 0.0)
    return TensorFigures(
        name=(worst.name if len(group) == 1 else fold_indices(worst.name)) or "the output",
        kind=str(worst.kind),
        step=worst.step,
        agreement=str(worst.agreement),
        repeat=len(group),
        error=_round(worst.error),
        noise=_round(worst.noise),
        ranks=format_ranks(worst.ranks),
        suspect="" if worst.suspect in (None, Suspect.UNKNOWN) else str(worst.suspect),
        detail=worst.detail,
    )


def _round(error: float | None) -> float | None:
    """Three digits; more would be noise, and tokens."""
    return None if error is None else float(f"{error:.3g}")


def read_parallel(recording: Recording) -> tuple[ParallelFigures, ...]:
    """Read each parallel program."""
    return tuple(map(_read_program, recording.parallel))


def _read_program(program: Parallelization) -> ParallelFigures:
    peaks = [memory.peak_bytes for memory in program.rank_memory]
    return ParallelFigures(
        program=program.program,
        mesh=name_mesh(program.axes),
        is_training=program.is_training,
        proof=summarize_proof(program).plain,
        num_ops=program.num_ops,
        inserted=dict(Counter(f"{call.kind}[{call.axis}]" for call in program.inserted)),
        inserted_bytes=sum(call.size_bytes for call in program.inserted),
        peak_bytes=max(peaks, default=None),
        fallbacks=tuple(map(_read_fallback, program.fallbacks)),
        different=_read_different(program.verdicts, FINE),
    )


def _read_fallback(fallback: Fallback) -> FallbackFigures:
    return FallbackFigures(
        op=fallback.op,
        module=fallback.module,
        axis=fallback.axis,
        kind=str(fallback.kind),
        size_bytes=fallback.size_bytes,
        remedy=fallback.remedy,
        line=name_line(fallback.source),
        code=read_code(fallback.source),
    )


def read_coverage(recording: Recording) -> tuple[CoverageFigures, ...]:
    """Read each level of op coverage."""
    return tuple(map(_read_level, recording.coverage))


def _read_level(coverage: Coverage) -> CoverageFigures:
    calls: Counter[str] = Counter()
    for op in coverage.ops:
        calls[str(op.verdict)] += op.num_forward + op.num_backward
    return CoverageFigures(
        level=str(coverage.level),
        mesh=name_mesh(coverage.axes),
        summary=summarize_level(coverage).plain,
        verdicts=dict(calls),
        blockers=tuple(map(_read_blocker, list_blockers(coverage))),
    )


def _read_blocker(op: OpCoverage) -> BlockerFigures:
    source = op.sources[0] if op.sources else None
    return BlockerFigures(
        op=op.op,
        verdict=str(op.verdict),
        num_calls=op.num_forward + op.num_backward,
        flops=op.flops,
        detail=op.detail,
        remedy=op.remedy,
        modules=op.modules[:_MAX_MODULES],
        line=name_line(source),
        code=read_code(source),
    )


def read_compiler(recording: Recording) -> tuple[CompilerFigures, ...]:
    """Read what torch.compile made of each function; ranks that compiled the same share one."""
    return tuple(
        _read_explanation(explanation, ranks)
        for explanation, ranks in fold_explanations(recording.explanations)
    )


def _read_explanation(explanation: Explanation, ranks: list[int]) -> CompilerFigures:
    return CompilerFigures(
        target=explanation.target,
        ranks=format_ranks(compress_ranks(ranks)),
        num_graphs=explanation.num_graphs,
        num_ops=explanation.num_ops,
        num_breaks=explanation.num_break_sites,
        num_recompiles=explanation.num_recompiles,
        num_skipped=explanation.num_skipped_frames,
        breaks=tuple(map(_read_break, explanation.break_sites)),
        recompiles=tuple(
            RecompileFigures(
                function=recompile.function,
                description=recompile.description or recompile.guard,
                line=name_line(recompile.source),
            )
            for recompile in explanation.recompiles
        ),
        skipped=tuple(
            SkipFigures(function=frame.function, reason=frame.reason, line=name_line(frame.source))
            for frame in explanation.skipped_frames
        ),
    )


def _read_break(site: BreakSite) -> BreakFigures:
    return BreakFigures(
        line=name_line(site.source),
        reason=site.reason,
        num_events=site.num_events,
        code=read_code(site.source),
        explanation=site.explanation,
        hints=site.hints[:_MAX_HINTS],
        fix=site.fix,
    )


def read_diagnoses(recording: Recording) -> tuple[DiagnosisFigures, ...]:
    """Read how each compiled function compares with eager execution."""
    return tuple(map(_read_diagnosis, recording.diagnoses))


def _read_diagnosis(diagnosis: Diagnosis) -> DiagnosisFigures:
    deviation = diagnosis.deviation
    return DiagnosisFigures(
        target=diagnosis.target,
        backend=diagnosis.backend,
        condition=str(diagnosis.condition),
        fact=diagnosis.fact,
        stage=str(diagnosis.stage or ""),
        part=diagnosis.part,
        phase=str(diagnosis.phase or ""),
        suspects=tuple(
            SuspectFigures(
                op=suspect.op,
                module=suspect.module or "",
                line=name_line(suspect.source),
                code=read_code(suspect.source),
            )
            for suspect in diagnosis.suspects
        ),
        max_ulp=None if deviation is None else deviation.max_ulp,
        repro=diagnosis.repro,
        is_verified=diagnosis.is_verified,
        passing=diagnosis.passing,
        notes=diagnosis.notes,
    )
