"""A recording as metrics and tables, for TensorBoard, W&B and MLflow."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from shardscope.record import (
    Collective,
    Coverage,
    Level,
    MemoryKind,
    OpVerdict,
    Recording,
    Severity,
    count_ranks,
    describe_cause,
)
from shardscope.record.base import name_line
from shardscope.record.recording import name_axis
from shardscope.record.text import sanitize_text
from shardscope.record.traffic import (
    TrafficTotals,
    count_traffic,
)
from shardscope.report.model.memory_peaks import find_worst
from shardscope.report.text.problems import sort_findings

_MAX_ROWS = 50

Scalars = Iterator[tuple[str, float]]


def list_scalars(recording: Recording) -> dict[str, float]:
    """List metrics by name, such as `comm_by_axis/tp/wire_bytes`.

    Communication is given per rank, as the mean over ranks, so that parts add up to their total;
    other metrics are those of the rank with the largest value. What was not recorded has no metric;
    `run/` describes what the metrics cover.
    """
    makers = (
        _list_traffic,
        _list_memory,
        _list_compiler,
        _list_coverage,
        _list_findings,
        _list_run,
    )
    return {sanitize_text(name): value for make in makers for name, value in make(recording)}


def _count_recorded(recording: Recording) -> int:
    """Count the ranks in a recording; at least one."""
    ranks = {call.rank for call in recording.collectives}
    return max(1, count_ranks(recording.run.ranks), len(ranks))


def _list_traffic(recording: Recording) -> Scalars:
    run = recording.run
    if not recording.collectives and "trace" not in run.instruments:
        return
    num_ranks = _count_recorded(recording)
    parts: dict[str, Callable[[Collective], str]] = {
        "axis": lambda call: name_axis(call, run.world_size),
        "kind": lambda call: str(call.kind),
        "phase": lambda call: str(call.phase),
    }
    yield from _sum_up("comm", recording, lambda _: "", num_ranks)
    for name, read in parts.items():
        yield from _sum_up(f"comm_by_{name}", recording, read, num_ranks)


def _sum_up(
    name: str, recording: Recording, read: Callable[[Collective], str], num_ranks: int
) -> Scalars:
    sums: dict[str, TrafficTotals] = defaultdict(TrafficTotals)
    if name == "comm":
        sums[""] = TrafficTotals()  # zero collectives are a result, too
    for call in recording.collectives:
        sums[read(call)] += count_traffic(call)
    for part, totals in sorted(sums.items()):
        prefix = f"{name}/{part}" if part else name
        yield f"{prefix}/count", totals.count / num_ranks
        yield f"{prefix}/input_bytes", totals.input_bytes / num_ranks
        yield f"{prefix}/wire_bytes", totals.wire_bytes / num_ranks


def _list_memory(recording: Recording) -> Scalars:
    if not recording.memory:
        return
    most = find_worst(recording.memory)
    for name in ("peak_bytes", "first_peak_bytes", "reserved_bytes", "needed_bytes"):
        value = getattr(most, name)
        if value is not None:
            yield f"memory/{name}", value
    bytes_by_kind: Counter[MemoryKind] = Counter()
    for use in most.at_peak:
        bytes_by_kind[use.kind] += use.num_bytes
    for kind in MemoryKind:
        yield f"memory_at_peak/{kind}_bytes", bytes_by_kind[kind]


def _list_compiler(recording: Recording) -> Scalars:
    explanations = recording.explanations
    if not explanations:
        return
    yield "compiler/graphs", max(explanation.num_graphs for explanation in explanations)
    yield "compiler/graph_breaks", max(explanation.num_break_sites for explanation in explanations)
    yield "compiler/recompiles", max(explanation.num_recompiles for explanation in explanations)
    yield (
        "compiler/skipped_frames",
        max(explanation.num_skipped_frames for explanation in explanations),
    )


def _list_coverage(recording: Recording) -> Scalars:
    for level in Level:
        coverages = [coverage for coverage in recording.coverage if coverage.level is level]
        for verdict in OpVerdict if coverages else ():
            yield (
                f"coverage/{level}/{verdict}",
                max(_count_ops(coverage, verdict) for coverage in coverages),
            )


def _count_ops(coverage: Coverage, verdict: OpVerdict) -> int:
    return sum(op.verdict is verdict for op in coverage.ops)


def _list_findings(recording: Recording) -> Scalars:
    severities = Counter(finding.severity for finding in recording.findings)
    for severity in Severity:
        yield f"findings/{severity}", severities[severity]
    yield "findings/gaps", len(recording.gaps)


def _list_run(recording: Recording) -> Scalars:
    """Yield metrics of the run itself: whether it is simulated, and its size."""
    run = recording.run
    yield "run/is_simulated", float(run.is_simulated)
    yield "run/recorded_ranks", count_ranks(run.ranks)
    yield "run/world_size", run.world_size
    if run.num_forwards is not None:
        yield "run/forward_passes", run.num_forwards


Cell = str | float


class MetricTable(NamedTuple):
    """A table of a recording, with the most important rows first."""

    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]


def list_tables(recording: Recording) -> dict[str, MetricTable]:
    """List the tables `causes`, `memory_at_peak` and `findings`, as far as they have rows.

    Each has at most 50 rows. Traffic is that of a rank: the mean, where ranks differ.
    """
    makers = {
        "causes": _list_causes,
        "memory_at_peak": _list_memory_at_peak,
        "findings": _list_problems,
    }
    tables = {name: make(recording) for name, make in makers.items()}
    return {
        name: table._replace(rows=[tuple(map(_make_cell, row)) for row in table.rows[:_MAX_ROWS]])
        for name, table in tables.items()
        if table.rows
    }


def _make_cell(cell: Cell) -> Cell:
    return sanitize_text(cell) if isinstance(cell, str) else cell


def _list_causes(recording: Recording) -> MetricTable:
    num_ranks = _count_recorded(recording)
    sums: dict[tuple[str, ...], TrafficTotals] = defaultdict(TrafficTotals)
    for call in recording.collectives:
        axis = name_axis(call, recording.run.world_size)
        key = (
            describe_cause(call.cause),
            str(call.kind),
            axis,
            str(call.phase),
            name_line(call.source),
        )
        sums[key] += count_traffic(call)
    ranked = sorted(sums.items(), key=lambda item: (-item[1].wire_bytes, item[0]))
    columns = ("cause", "kind", "axis", "phase", "line", "count", "input_bytes", "wire_bytes")
    return MetricTable(
        columns,
        [
            (
                *names,
                totals.count / num_ranks,
                totals.input_bytes / num_ranks,
                totals.wire_bytes / num_ranks,
            )
            for names, totals in ranked
        ],
    )


def _list_memory_at_peak(recording: Recording) -> MetricTable:
    uses = find_worst(recording.memory).at_peak if recording.memory else ()
    ranked = sorted(uses, key=lambda use: -use.num_bytes)
    rows: list[tuple[Cell, ...]] = [
        (str(use.kind), "outside any module" if use.module is None else use.module, use.num_bytes)
        for use in ranked
    ]
    return MetricTable(("kind", "module", "bytes"), rows)


def _list_problems(recording: Recording) -> MetricTable:
    rows = dict.fromkeys(
        (str(finding.severity), finding.rule, finding.subject, finding.fact, finding.remedy)
        for finding in sort_findings(recording)
    )
    return MetricTable(("severity", "rule", "subject", "fact", "remedy"), list(rows))
