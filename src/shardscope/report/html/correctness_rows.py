"""Data of the correctness view: parity verdicts, parallel programs and checks before launch."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shardscope.record import (
    FINE,
    TOLERABLE,
    Agreement,
    Check,
    Divergence,
    Fallback,
    Finding,
    Inserted,
    Parallelization,
    Parity,
    Phase,
    Recording,
    Severity,
    TensorKind,
    TensorVerdict,
    format_ranks,
)
from shardscope.record.layer_names import join_layers_in_texts
from shardscope.report.html.page_index import NOWHERE, Index
from shardscope.report.html.page_views import (
    DivergenceItem,
    FallbackRow,
    InsertedRow,
    ParallelItem,
    ParityItem,
    Proof,
    RankCheckItem,
    TensorTable,
    VariationTable,
)
from shardscope.report.text.checked_ranks import describe_ranks, sort_variations, summarize_check
from shardscope.report.text.correctness import (
    group_identical,
    layer_group_key,
    summarize_parallel,
    summarize_parity,
    summarize_proof,
)
from shardscope.report.text.heading import name_mesh


def make_proof(recording: Recording, index: Index) -> Proof | None:
    """Make the view, or None if there is no check of any kind and no parallel program."""
    if not recording.parity and not recording.parallel and not recording.checks:
        return None
    return Proof(
        parity=tuple(
            _make_parity(parity, index, recording.findings) for parity in recording.parity
        ),
        parallel=tuple(_make_parallel(program, index) for program in recording.parallel),
        checks=tuple(_make_check(check, index, recording.findings) for check in recording.checks),
    )


def _make_check(check: Check, index: Index, findings: Sequence[Finding]) -> RankCheckItem:
    severities = {finding.severity for finding in findings}
    variations = sort_variations(check)
    return RankCheckItem(
        ranks=describe_ranks(check),
        summary=summarize_check(check),
        severity=next(
            (str(item) for item in (Severity.ERROR, Severity.WARNING) if item in severities), ""
        ),
        variations=VariationTable(
            condition=tuple(variation.condition for variation in variations),
            outcome=tuple(str(variation.outcome) for variation in variations),
            detail=tuple(variation.detail for variation in variations),
            ranks=tuple(format_ranks(variation.ranks) for variation in variations),
            source=tuple(index.source(variation.source) for variation in variations),
        ),
    )


def _make_parity(parity: Parity, index: Index, findings: Sequence[Finding]) -> ParityItem:
    tensors = _make_table(parity.tensors, index, fine=TOLERABLE)
    return ParityItem(
        mesh=name_mesh(parity.axes),
        summary=summarize_parity(parity, findings).plain,
        is_fine=bool(parity.tensors) and all(tensors.is_fine),
        tensors=tensors,
        divergences=tuple(_make_divergence(divergence, index) for divergence in parity.divergences),
    )


def _make_table(
    verdicts: Sequence[TensorVerdict], index: Index, *, fine: Collection[Agreement]
) -> TensorTable:
    ordered = sorted(verdicts, key=lambda verdict: verdict.agreement in fine)
    return TensorTable(
        name=tuple(map(_name_tensor, ordered)),
        kind=tuple(map(_name_kind, ordered)),
        agreement=tuple(verdict.agreement.replace("_", " ") for verdict in ordered),
        is_fine=tuple(verdict.agreement in fine for verdict in ordered),
        error=tuple(verdict.error for verdict in ordered),
        noise=tuple(verdict.noise for verdict in ordered),
        suspect=tuple((verdict.suspect or "").replace("_", " ") for verdict in ordered),
        detail=tuple(verdict.detail for verdict in ordered),
        ranks=tuple(format_ranks(verdict.ranks) for verdict in ordered),
        module=tuple(_find_owner(verdict, index) for verdict in ordered),
        phase=tuple(str(_PHASES.get(verdict.kind, "")) for verdict in ordered),
        step=tuple(verdict.step or 0 for verdict in ordered),
        dtype=tuple(verdict.dtype for verdict in ordered),
    )


# The phase that computes each kind of tensor; parameters are compared before any.
_PHASES = {
    TensorKind.OUTPUT: Phase.FORWARD,
    TensorKind.LOSS: Phase.FORWARD,
    TensorKind.BUFFER: Phase.FORWARD,
    TensorKind.COUNTER: Phase.FORWARD,
    TensorKind.GRADIENT: Phase.BACKWARD,
    TensorKind.NORM: Phase.OUTSIDE,
    TensorKind.CLIPPED: Phase.OUTSIDE,
    TensorKind.REPORTED: Phase.OUTSIDE,
    TensorKind.SETTING: Phase.OPTIMIZER,
    TensorKind.STATE: Phase.OPTIMIZER,
    TensorKind.UPDATED: Phase.OPTIMIZER,
}


def _name_tensor(verdict: TensorVerdict) -> str:
    """`the output`; `output [0]` if there are several; the name of another tensor."""
    if verdict.kind is not TensorKind.OUTPUT:
        return verdict.name
    return f"output {verdict.name}" if verdict.name else "the output"


def _name_kind(verdict: TensorVerdict) -> str:
    """What a tensor is, and in which of several training steps: `gradient, step 2`."""
    return str(verdict.kind) if verdict.step is None else f"{verdict.kind}, step {verdict.step}"


def _find_owner(verdict: TensorVerdict, index: Index) -> int:
    """Return the position of the module that owns a tensor; the model's output has no owner."""
    return NOWHERE if verdict.module is None else index.module(verdict.module)


def _make_divergence(divergence: Divergence, index: Index) -> DivergenceItem:
    return DivergenceItem(
        module=index.module(divergence.module),
        path=divergence.module,
        phase=divergence.phase,
        suspect=divergence.suspect.replace("_", " "),
        detail=divergence.detail,
        op=divergence.op,
        remedy=divergence.remedy,
        source=index.source(divergence.source),
    )


def _make_parallel(program: Parallelization, index: Index) -> ParallelItem:
    tensors = _make_table(program.verdicts, index, fine=FINE)
    inserted = group_identical(program.inserted, layer_group_key, is_folded=True)
    fallbacks = group_identical(program.fallbacks, layer_group_key, is_folded=True)
    return ParallelItem(
        program=program.program,
        mesh=name_mesh(program.axes),
        summary=f"{summarize_parallel(program).plain}. {summarize_proof(program).plain}",
        is_fine=bool(program.verdicts) and all(tensors.is_fine),
        inserted=tuple(_make_inserted(group, index) for group in inserted),
        fallbacks=tuple(_make_fallback(group, index) for group in fallbacks),
        tensors=tensors,
    )


def _make_inserted(group: Sequence[Inserted], index: Index) -> InsertedRow:
    collective = group[0]
    return InsertedRow(
        kind=collective.kind,
        axis=collective.axis,
        phase=collective.phase,
        size_bytes=collective.size_bytes,
        cause=join_layers_in_texts([same.cause for same in group]),
        modules=tuple(index.module(same.module) for same in group),
        sources=tuple(index.source(same.source) for same in group),
    )


def _make_fallback(group: Sequence[Fallback], index: Index) -> FallbackRow:
    fallback = group[0]
    return FallbackRow(
        op=fallback.op,
        kind=fallback.kind,
        axis=fallback.axis,
        placements=", ".join(fallback.placements),
        remedy=fallback.remedy,
        sizes_bytes=tuple(same.size_bytes for same in group),
        modules=tuple(index.module(same.module) for same in group),
        sources=tuple(index.source(same.source) for same in group),
    )
