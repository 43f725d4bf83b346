"""Figures of an entire recording: memory, graph breaks, ops, fallbacks, findings, gaps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from shardscope.contract.limits import Evidence, Figure, Limit
from shardscope.record import (
    Coverage,
    Explanation,
    Finding,
    Gap,
    MemoryProfile,
    OpVerdict,
    Parallelization,
    RankSpan,
    Recording,
    Severity,
)

_VERDICTS = {
    Figure.MISSING_OPS: (OpVerdict.MISSING,),
    Figure.WRONG_OPS: (OpVerdict.WRONG,),
    Figure.REPLICATED_OPS: (OpVerdict.REPLICATED,),
    Figure.UNCOVERED_OPS: (OpVerdict.WRONG, OpVerdict.MISSING, OpVerdict.REPLICATED),
}


class Total(Struct, frozen=True, kw_only=True):
    """A figure and what counts towards it; `where` is its level or program, `flaw` why it is
    incomplete.
    """

    value: int
    evidence: tuple[Evidence, ...] = ()
    ranks: tuple[RankSpan, ...] = ()
    where: str = ""
    flaw: str = ""


def measure_total(limit: Limit, recordings: Sequence[Recording]) -> list[Total]:
    """The figure for each rank, level or program that measured it; empty if none did."""
    figure = limit.figure
    if figure is Figure.GAPS:
        return [_count_gaps(recordings)]
    if figure is Figure.FINDINGS:
        return [_count_findings(limit, recordings)]
    if figure is Figure.PEAK_MEMORY:
        return [_find_peak(record) for recording in recordings for record in recording.memory]
    if figure is Figure.FALLBACKS:
        return [
            _count_fallbacks(record) for recording in recordings for record in recording.parallel
        ]
    if figure in _VERDICTS:
        verdicts = _VERDICTS[figure]
        return [
            _count_ops(record, verdicts)
            for recording in recordings
            for record in recording.coverage
        ]
    return [total for recording in recordings for total in _read_compiler(figure, recording)]


def _find_peak(profile: MemoryProfile) -> Total:
    uses = sorted(profile.at_peak, key=lambda use: -use.num_bytes)
    return Total(
        value=profile.peak_bytes,
        ranks=(RankSpan(profile.rank),),
        where=f"in {profile.peak_phase}",
        evidence=tuple(
            Evidence(
                what=f"{use.kind} at the peak", module=use.module, count=0, num_bytes=use.num_bytes
            )
            for use in uses
        ),
    )


def _read_compiler(figure: Figure, recording: Recording) -> Iterable[Total]:
    """The compiler's figure for each rank, summed over its functions."""
    by_rank: dict[int, list[Explanation]] = defaultdict(list)
    for item in recording.explanations:
        by_rank[item.rank].append(item)
    count = _COMPILER[figure]
    for rank, explanations in by_rank.items():
        evidence = tuple(item for explanation in explanations for item in count(explanation))
        flaw = next(
            (f"{item.target} raised {item.failure}" for item in explanations if item.failure), ""
        )
        yield Total(
            value=sum(item.count for item in evidence),
            ranks=(RankSpan(rank),),
            evidence=evidence,
            flaw=flaw,
        )


def _list_breaks(explanation: Explanation) -> Iterable[Evidence]:
    for site in explanation.break_sites:
        name = f"{site.break_id} {site.reason}".strip()
        fix = site.fix or next(iter(site.hints), "")
        yield Evidence(what=name, count=site.num_events, source=site.source, remedy=fix)


def _list_recompiles(explanation: Explanation) -> Iterable[Evidence]:
    for recompile in explanation.recompiles:
        yield Evidence(
            what=f"{recompile.function} compiled again",
            cause=recompile.description,
            source=recompile.source,
        )


def _list_skipped(explanation: Explanation) -> Iterable[Evidence]:
    for frame in explanation.skipped_frames:
        what = f"{'the rest of ' if frame.is_rest else ''}{frame.function} runs eagerly"
        yield Evidence(what=what, cause=frame.reason, source=frame.source)


_COMPILER: dict[Figure, Callable[[Explanation], Iterable[Evidence]]] = {
    Figure.GRAPH_BREAKS: _list_breaks,
    Figure.RECOMPILES: _list_recompiles,
    Figure.SKIPPED_FUNCTIONS: _list_skipped,
}


def _count_ops(coverage: Coverage, verdicts: tuple[OpVerdict, ...]) -> Total:
    ops = [op for op in coverage.ops if op.verdict in verdicts]
    ops.sort(key=lambda op: (verdicts.index(op.verdict), -(op.flops or 0)))
    return Total(
        value=len(ops),
        ranks=(RankSpan(coverage.rank),),
        where=f"at the level {coverage.level}",
        evidence=tuple(
            Evidence(
                what=f"{op.op} is {op.verdict}",
                cause=op.detail,
                count=op.num_forward + op.num_backward,
                module=next(iter(op.modules), None),
                source=next(iter(op.sources), None),
                remedy=op.remedy,
            )
            for op in ops
        ),
    )


def _count_fallbacks(program: Parallelization) -> Total:
    fallbacks = sorted(program.fallbacks, key=lambda fallback: -fallback.size_bytes)
    return Total(
        value=len(fallbacks),
        where=f"in {program.program}" if program.program else "",
        evidence=tuple(
            Evidence(
                what=f"{fallback.op} on {', '.join(fallback.placements)}: {fallback.kind}",
                remedy=fallback.remedy,
                module=fallback.module,
                num_bytes=fallback.size_bytes,
                source=fallback.source,
            )
            for fallback in fallbacks
        ),
    )


def _count_findings(limit: Limit, recordings: Sequence[Recording]) -> Total:
    """Count findings as `show` lists them: the same finding of several ranks counts once."""
    counts: dict[Finding, int] = defaultdict(int)
    for finding in (finding for recording in recordings for finding in recording.findings):
        is_severe = limit.severity is None or finding.severity is limit.severity
        if is_severe and (not limit.rule or finding.rule == limit.rule):
            counts[replace(finding, rank=None)] += 1
    return Total(
        value=len(counts),
        evidence=tuple(
            Evidence(
                what=f"{finding.rule} in {finding.subject}",
                cause=finding.fact,
                source=finding.source,
                remedy=finding.remedy,
            )
            for finding in sorted(
                counts, key=lambda finding: list(Severity).index(finding.severity)
            )
        ),
    )


def _count_gaps(recordings: Sequence[Recording]) -> Total:
    gaps: dict[Gap, None] = dict.fromkeys(
        replace(gap, rank=None) for recording in recordings for gap in recording.gaps
    )
    evidence = tuple(Evidence(what=gap.place, cause=gap.fact) for gap in gaps)
    return Total(value=len(gaps), evidence=evidence)
