"""Data of the compiler and coverage views."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from msgspec.structs import replace

from shardscope.record import (
    BreakSite,
    CompiledGraph,
    Coverage,
    Diagnosis,
    Explanation,
    FrameGuards,
    Move,
    OpCoverage,
    OpVerdict,
    Recompile,
    Recording,
    Sharding,
    SkippedFrame,
    compress_ranks,
    format_ranks,
)
from shardscope.record.units import format_bytes
from shardscope.report.html.page_index import NOWHERE, Index
from shardscope.report.html.page_views import (
    BreakRow,
    Compiler,
    DiagnosisItem,
    ExplanationItem,
    GraphItem,
    GuardTable,
    LevelCoverage,
    OpRow,
    RecompileRow,
    ShardingRow,
    SkippedRow,
    StageRow,
    SuspectRow,
)
from shardscope.report.model.guards import GuardKind, describe_guard
from shardscope.report.text.compiler import (
    describe_deviation,
    describe_end,
    describe_location,
    fold_explanations,
    name_condition,
    summarize_explanation,
)
from shardscope.report.text.heading import name_mesh
from shardscope.report.text.style import shorten

_MAX_OPS = 20_000  # of all graphs together
_MAX_GRAPH_OPS = 2_000
_MAX_GUARDS = 5_000  # of an explanation
_MAX_GUARD = 1_000  # characters
_GUARD_KINDS = list(GuardKind)


def make_compiler(recording: Recording, index: Index) -> Compiler | None:
    """Make the view, or None if there are no explanations and no diagnoses."""
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
    diagnoses = tuple(_make_diagnosis(diagnosis, index) for diagnosis in recording.diagnoses)
    return Compiler(explanations=tuple(items), diagnoses=diagnoses)


def _make_explanation(
    explanation: Explanation, ranks: list[int], graphs: tuple[GraphItem, ...], index: Index
) -> ExplanationItem:
    return ExplanationItem(
        target=explanation.target,
        ranks=format_ranks(compress_ranks(ranks)),
        summary=summarize_explanation(explanation).plain,
        num_break_events=explanation.num_break_events,
        graphs=graphs,
        break_sites=tuple(_make_break(site, index) for site in explanation.break_sites),
        recompiles=tuple(_make_recompile(again, index) for again in explanation.recompiles),
        skipped_frames=tuple(_make_skip(skip, index) for skip in explanation.skipped_frames),
        guards=tuple(_make_guards(explanation.guards)),
        stages=tuple(
            StageRow(stage=stage.stage, num_calls=stage.num_calls, total_ns=stage.total_ns)
            for stage in explanation.stages
        ),
        failure=explanation.failure,
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
        op=tuple(op.op for op in ops),
        kind=tuple(str(op.kind) for op in ops),
        result=tuple(op.result for op in ops),
        module=tuple(index.module(op.module) if op.module else NOWHERE for op in ops),
        line=tuple(index.source(op.source) for op in ops),
        within=tuple(op.within for op in ops),
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


def _make_recompile(recompile: Recompile, index: Index) -> RecompileRow:
    return RecompileRow(
        function=recompile.function,
        number=recompile.number,
        guard=recompile.guard,
        description=recompile.description,
        source=index.source(recompile.source),
    )


def _make_guards(frames: tuple[FrameGuards, ...]) -> Iterator[GuardTable]:
    room = _MAX_GUARDS
    for frame in frames:
        described = [(describe_guard(guard), guard) for guard in frame.guards[:room]]
        described.sort(key=lambda item: _GUARD_KINDS.index(item[0].kind))
        facts, guards = [fact for fact, _ in described], [guard for _, guard in described]
        room -= len(guards)
        yield GuardTable(
            compile_id=frame.compile_id,
            function=frame.function,
            kind=tuple(str(fact.kind) for fact in facts),
            subject=tuple(fact.subject for fact in facts),
            condition=tuple(fact.condition for fact in facts),
            guard=tuple(shorten(guard, _MAX_GUARD) for guard in guards),
            left_out=len(frame.guards) - len(guards),
        )


def _make_skip(frame: SkippedFrame, index: Index) -> SkippedRow:
    return SkippedRow(
        function=frame.function,
        reason=frame.reason,
        is_rest=frame.is_rest,
        source=index.source(frame.source),
    )


def _make_diagnosis(diagnosis: Diagnosis, index: Index) -> DiagnosisItem:
    return DiagnosisItem(
        target=diagnosis.target,
        backend=diagnosis.backend,
        rank=diagnosis.rank,
        condition=name_condition(diagnosis.condition),
        is_bad=diagnosis.condition.is_bad,
        fact=diagnosis.fact,
        stage=diagnosis.stage or "",
        part=diagnosis.part,
        where=describe_location(diagnosis) if diagnosis.graph is not None else "",
        num_queries=diagnosis.num_queries,
        suspects=tuple(
            SuspectRow(
                op=suspect.op,
                module=index.module(suspect.module),
                source=index.source(suspect.source),
            )
            for suspect in diagnosis.suspects
        ),
        is_minimal=diagnosis.is_minimal,
        deviation=describe_deviation(diagnosis.deviation),
        error=diagnosis.error,
        repro=diagnosis.repro,
        script=diagnosis.script,
        is_verified=diagnosis.is_verified,
        passing=diagnosis.passing,
        notes=diagnosis.notes,
    )


_WORST_FIRST = (
    OpVerdict.WRONG,
    OpVerdict.MISSING,
    OpVerdict.REPLICATED,
    OpVerdict.REDISTRIBUTED,
    OpVerdict.DECOMPOSED,
    OpVerdict.SHARDED,
    OpVerdict.LOCAL,
)


def make_coverage(recording: Recording, index: Index) -> tuple[LevelCoverage, ...]:
    """Make an item for each level; ranks with equal coverage share an item."""
    ranks: dict[Coverage, list[int]] = {}
    for coverage in recording.coverage:
        ranks.setdefault(replace(coverage, rank=0), []).append(coverage.rank)
    has_many = len({coverage.rank for coverage in recording.coverage}) > 1
    return tuple(
        _make_level(coverage, index, ranks=same_ranks if has_many else [])
        for coverage, same_ranks in ranks.items()
    )


def _make_level(coverage: Coverage, index: Index, *, ranks: list[int]) -> LevelCoverage:
    counts = Counter(op.verdict for op in coverage.ops)
    named = f", ranks {format_ranks(compress_ranks(sorted(set(ranks))))}" if ranks else ""
    return LevelCoverage(
        level=f"{coverage.level}{named}",
        mesh=name_mesh(coverage.axes),
        has_plan=coverage.has_plan,
        verdicts=tuple(map(str, _WORST_FIRST)),
        counts=tuple(counts[verdict] for verdict in _WORST_FIRST),
        ops=tuple(_make_op(op, index) for op in sorted(coverage.ops, key=_sort_key)),
    )


def _sort_key(op: OpCoverage) -> tuple[int, int, int, str]:
    num_calls = op.num_forward + op.num_backward
    return _WORST_FIRST.index(op.verdict), -(op.flops or 0), -num_calls, op.op


def _make_op(op: OpCoverage, index: Index) -> OpRow:
    return OpRow(
        op=op.op,
        schema=op.schema,
        verdict=op.verdict,
        num_forward=op.num_forward,
        num_backward=op.num_backward,
        flops=op.flops,
        moved_bytes=sum(move.num_bytes for move in op.moves),
        detail=op.detail,
        remedy=op.remedy,
        moves=tuple(map(_describe_move, op.moves)),
        shardings=tuple(map(_make_sharding, op.shardings)),
        modules=tuple(dict.fromkeys(map(index.module, op.modules))),
        sources=tuple(map(index.source, op.sources)),
    )


def _describe_move(move: Move) -> str:
    before, after = ", ".join(move.before), ", ".join(move.after)
    return f"{move.argument}: {before} → {after} ({format_bytes(move.num_bytes)})"


def _make_sharding(sharding: Sharding) -> ShardingRow:
    return ShardingRow(
        inputs=", ".join(sharding.inputs),
        verdict=sharding.verdict,
        outputs=", ".join(filter(None, sharding.outputs)),
        num_bytes=sharding.num_bytes,
        detail=sharding.detail,
    )
