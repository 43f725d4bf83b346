"""What the compiler did, and whether it was right."""

from __future__ import annotations

from shardscope.record import (
    BreakSite,
    CompiledGraph,
    Diagnosis,
    Explanation,
    Recompile,
    Recording,
    SkippedFrame,
    compress_ranks,
    format_ranks,
)
from shardscope.report.diagnosis import describe_deviation, describe_place, name_condition
from shardscope.report.explain import describe_end, fold_explanations, summarize_explanation
from shardscope.report.page.compiler import (
    BreakRow,
    Compiler,
    DiagnosisItem,
    ExplanationItem,
    GraphItem,
    RecompileRow,
    SkippedRow,
    StageRow,
    SuspectRow,
)
from shardscope.report.page.index import NOWHERE, Index

__all__ = ["make_compiler"]

_MAX_OPS = 20_000  # of all graphs together
_MAX_GRAPH_OPS = 2_000


def make_compiler(recording: Recording, index: Index) -> Compiler | None:
    """None where no compiler was looked at."""
    if not recording.explanations and not recording.diagnoses:
        return None
    room = _MAX_OPS
    items = []
    for explanation, ranks in fold_explanations(recording.explanations):
        graphs = []
        for graph in explanation.graphs:
            num_listed = min(len(graph.ops), _MAX_GRAPH_OPS, room)
            graphs.append(_make_graph(graph, explanation, index, num_listed))
            room -= num_listed
        items.append(_make_explanation(explanation, ranks, tuple(graphs), index))
    diagnoses = tuple(_make_diagnosis(one, index) for one in recording.diagnoses)
    return Compiler(explanations=tuple(items), diagnoses=diagnoses)


def _make_explanation(
    one: Explanation, ranks: list[int], graphs: tuple[GraphItem, ...], index: Index
) -> ExplanationItem:
    return ExplanationItem(
        target=one.target,
        ranks=format_ranks(compress_ranks(ranks)),
        words=summarize_explanation(one).plain,
        num_break_events=one.num_break_events,
        graphs=graphs,
        break_sites=tuple(_make_break(site, index) for site in one.break_sites),
        recompiles=tuple(_make_recompile(again, index) for again in one.recompiles),
        skipped_frames=tuple(_make_skip(skip, index) for skip in one.skipped_frames),
        stages=tuple(
            StageRow(stage=stage.stage, num_calls=stage.num_calls, total_ns=stage.total_ns)
            for stage in one.stages
        ),
        failure=one.failure,
    )


def _make_graph(
    graph: CompiledGraph, explanation: Explanation, index: Index, num_listed: int
) -> GraphItem:
    ops = graph.ops[:num_listed]
    has_site = graph.break_site is not None and graph.break_site < len(explanation.break_sites)
    return GraphItem(
        index=graph.index,
        function=graph.function,
        end=describe_end(graph, explanation),
        num_inputs=graph.num_inputs,
        num_outputs=graph.num_outputs,
        num_ops=graph.num_ops,
        fingerprint=graph.fingerprint,
        compile_id=graph.compile_id,
        is_recompile=graph.is_recompile,
        break_site=graph.break_site if graph.break_site is not None and has_site else NOWHERE,
        source=index.source(graph.source),
        op=tuple(one.op for one in ops),
        kind=tuple(str(one.kind) for one in ops),
        result=tuple(one.result for one in ops),
        module=tuple(index.module(one.module) if one.module else NOWHERE for one in ops),
        line=tuple(index.source(one.source) for one in ops),
        left_out=len(graph.ops) - num_listed,
    )


def _make_break(site: BreakSite, index: Index) -> BreakRow:
    return BreakRow(
        source=index.source(site.source),
        num_events=site.num_events,
        reason=site.reason,
        explanation=site.explanation,
        break_id=site.break_id,
        hints=site.hints,
        fix=site.fix,
    )


def _make_recompile(one: Recompile, index: Index) -> RecompileRow:
    return RecompileRow(
        function=one.function,
        number=one.number,
        guard=one.guard,
        description=one.description,
        source=index.source(one.source),
    )


def _make_skip(one: SkippedFrame, index: Index) -> SkippedRow:
    return SkippedRow(
        function=one.function,
        reason=one.reason,
        is_rest=one.is_rest,
        source=index.source(one.source),
    )


def _make_diagnosis(one: Diagnosis, index: Index) -> DiagnosisItem:
    return DiagnosisItem(
        target=one.target,
        backend=one.backend,
        rank=one.rank,
        condition=name_condition(one.condition),
        is_bad=one.condition.is_bad,
        fact=one.fact,
        stage=one.stage or "",
        part=one.part,
        where=describe_place(one) if one.graph is not None else "",
        num_queries=one.num_queries,
        suspects=tuple(
            SuspectRow(
                op=suspect.op,
                module=index.module(suspect.module),
                source=index.source(suspect.source),
            )
            for suspect in one.suspects
        ),
        is_minimal=one.is_minimal,
        deviation=describe_deviation(one.deviation) if one.deviation is not None else "",
        error=one.error,
        repro=one.repro,
        script=one.script,
        is_verified=one.is_verified,
        passing=one.passing,
        notes=one.notes,
    )
