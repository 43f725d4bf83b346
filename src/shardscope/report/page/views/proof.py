"""Whether the parallel program is the same, and how it was made."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shardscope.record import (
    FINE,
    TOLERABLE,
    Agreement,
    Divergence,
    Fallback,
    Finding,
    Inserted,
    Parallelization,
    Parity,
    Recording,
    TensorVerdict,
    format_ranks,
)
from shardscope.report.heading import name_mesh
from shardscope.report.numbered import name_all
from shardscope.report.page.index import Index
from shardscope.report.page.proof import (
    DivergenceItem,
    FallbackRow,
    InsertedRow,
    ParallelItem,
    ParityItem,
    Proof,
    VerdictTable,
)
from shardscope.report.parallel import (
    fold_alike,
    likeness_of,
    summarize_parallel,
    summarize_proof,
)
from shardscope.report.parity import summarize_parity

__all__ = ["make_proof"]


def make_proof(recording: Recording, index: Index) -> Proof | None:
    """None where nothing was compared and nothing cut."""
    if not recording.parity and not recording.parallel:
        return None
    return Proof(
        parity=tuple(_make_parity(one, index, recording.findings) for one in recording.parity),
        parallel=tuple(_make_parallel(one, index) for one in recording.parallel),
    )


def _make_parity(one: Parity, index: Index, findings: Sequence[Finding]) -> ParityItem:
    tensors = _make_table(one.tensors, fine=TOLERABLE)
    return ParityItem(
        mesh=name_mesh(one.axes),
        words=summarize_parity(one, findings).plain,
        is_fine=bool(one.tensors) and all(tensors.is_fine),
        tensors=tensors,
        divergences=tuple(_make_divergence(found, index) for found in one.divergences),
    )


def _make_table(verdicts: Sequence[TensorVerdict], *, fine: Collection[Agreement]) -> VerdictTable:
    ones = sorted(verdicts, key=lambda one: one.agreement in fine)
    return VerdictTable(
        name=tuple(one.name or "the output" for one in ones),
        kind=tuple(str(one.kind) for one in ones),
        agreement=tuple(one.agreement.replace("_", " ") for one in ones),
        is_fine=tuple(one.agreement in fine for one in ones),
        error=tuple(one.error for one in ones),
        noise=tuple(one.noise for one in ones),
        suspect=tuple((one.suspect or "").replace("_", " ") for one in ones),
        detail=tuple(one.detail for one in ones),
        ranks=tuple(format_ranks(one.ranks) for one in ones),
    )


def _make_divergence(one: Divergence, index: Index) -> DivergenceItem:
    return DivergenceItem(
        module=index.module(one.module),
        path=one.module,
        phase=one.phase,
        suspect=one.suspect.replace("_", " "),
        detail=one.detail,
        op=one.op,
        remedy=one.remedy,
        source=index.source(one.source),
    )


def _make_parallel(found: Parallelization, index: Index) -> ParallelItem:
    tensors = _make_table(found.verdicts, fine=FINE)
    inserted = fold_alike(found.inserted, likeness_of, is_folded=True)
    fallbacks = fold_alike(found.fallbacks, likeness_of, is_folded=True)
    return ParallelItem(
        program=found.program,
        mesh=name_mesh(found.axes),
        words=f"{summarize_parallel(found).plain}. {summarize_proof(found).plain}",
        is_fine=bool(found.verdicts) and all(tensors.is_fine),
        inserted=tuple(_make_inserted(group, index) for group in inserted),
        fallbacks=tuple(_make_fallback(group, index) for group in fallbacks),
        tensors=tensors,
    )


def _make_inserted(group: Sequence[Inserted], index: Index) -> InsertedRow:
    one = group[0]
    return InsertedRow(
        what=f"{one.kind}[{one.axis}]",
        phase=one.phase,
        count=len(group),
        size_bytes=sum(same.size_bytes for same in group),
        cause=name_all([same.cause for same in group]),
        module=index.module(one.module),
        source=index.source(one.source),
    )


def _make_fallback(group: Sequence[Fallback], index: Index) -> FallbackRow:
    one = group[0]
    return FallbackRow(
        op=one.op,
        kind=one.kind,
        axis=one.axis,
        count=len(group),
        size_bytes=sum(same.size_bytes for same in group),
        placements=", ".join(one.placements),
        remedy=one.remedy,
        module=index.module(one.module),
        source=index.source(one.source),
    )
