"""Figures of a whole recording: memory, graph breaks, ops, fallbacks, findings, gaps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from shardscope.contract.breach import Evidence
from shardscope.contract.limits import Figure, Limit
from shardscope.record import (
    Coverage,
    Explanation,
    Finding,
    Gap,
    MemoryProfile,
    Parallelization,
    RankSpan,
    Recording,
    Severity,
    Verdict,
)

__all__ = ["Whole", "measure_whole"]

_VERDICTS = {
    Figure.MISSING_OPS: (Verdict.MISSING,),
    Figure.WRONG_OPS: (Verdict.WRONG,),
    Figure.REPLICATED_OPS: (Verdict.REPLICATED,),
    Figure.UNCOVERED_OPS: (Verdict.WRONG, Verdict.MISSING, Verdict.REPLICATED),
}


class Whole(Struct, frozen=True, kw_only=True):
    """A figure and what counts towards it; `where` says in what, `flaw` why it is not to be had."""

    value: int
    evidence: tuple[Evidence, ...] = ()
    ranks: tuple[RankSpan, ...] = ()
    where: str = ""
    flaw: str = ""


def measure_whole(limit: Limit, recordings: Sequence[Recording]) -> list[Whole]:
    """The figure wherever it was looked at: of each rank, level or program; nothing if nowhere."""
    figure = limit.figure
    if figure is Figure.GAPS:
        return [_count_gaps(recordings)]
    if figure is Figure.FINDINGS:
        return [_count_findings(limit, recordings)]
    if figure is Figure.PEAK_MEMORY:
        return [_find_peak(one) for recording in recordings for one in recording.memory]
    if figure is Figure.FALLBACKS:
        return [_count_fallbacks(one) for recording in recordings for one in recording.parallel]
    if figure in _VERDICTS:
        verdicts = _VERDICTS[figure]
        return [_count_ops(one, verdicts) for each in recordings for one in each.coverage]
    return [whole for recording in recordings for whole in _read_compiler(figure, recording)]


def _find_peak(profile: MemoryProfile) -> Whole:
    uses = sorted(profile.at_peak, key=lambda use: -use.num_bytes)
    return Whole(
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


def _read_compiler(figure: Figure, recording: Recording) -> Iterable[Whole]:
    """What each rank compiled, all its functions together."""
    by_rank: dict[int, list[Explanation]] = defaultdict(list)
    for one in recording.explanations:
        by_rank[one.rank].append(one)
    count = _COMPILER[figure]
    for rank, found in by_rank.items():
        evidence = tuple(one for told in found for one in count(told))
        flaw = next((f"{one.target} raised {one.failure}" for one in found if one.failure), "")
        yield Whole(
            value=sum(one.count for one in evidence),
            ranks=(RankSpan(rank),),
            evidence=evidence,
            flaw=flaw,
        )


def _list_breaks(told: Explanation) -> Iterable[Evidence]:
    for site in told.break_sites:
        name = f"{site.break_id} {site.reason}".strip()
        fix = site.fix or next(iter(site.hints), "")
        yield Evidence(what=name, count=site.num_events, source=site.source, remedy=fix)


def _list_recompiles(told: Explanation) -> Iterable[Evidence]:
    for one in told.recompiles:
        yield Evidence(
            what=f"{one.function} compiled again", cause=one.description, source=one.source
        )


def _list_skipped(told: Explanation) -> Iterable[Evidence]:
    for one in told.skipped_frames:
        what = f"{'the rest of ' if one.is_rest else ''}{one.function} runs eagerly"
        yield Evidence(what=what, cause=one.reason, source=one.source)


_COMPILER: dict[Figure, Callable[[Explanation], Iterable[Evidence]]] = {
    Figure.GRAPH_BREAKS: _list_breaks,
    Figure.RECOMPILES: _list_recompiles,
    Figure.SKIPPED_FUNCTIONS: _list_skipped,
}


def _count_ops(coverage: Coverage, verdicts: tuple[Verdict, ...]) -> Whole:
    ops = [op for op in coverage.ops if op.verdict in verdicts]
    ops.sort(key=lambda op: (verdicts.index(op.verdict), -(op.flops or 0)))
    return Whole(
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


def _count_fallbacks(program: Parallelization) -> Whole:
    fallbacks = sorted(program.fallbacks, key=lambda one: -one.size_bytes)
    return Whole(
        value=len(fallbacks),
        where=f"in {program.program}" if program.program else "",
        evidence=tuple(
            Evidence(
                what=f"{one.op} on {', '.join(one.placements)}: {one.kind}",
                remedy=one.remedy,
                module=one.module,
                num_bytes=one.size_bytes,
                source=one.source,
            )
            for one in fallbacks
        ),
    )


def _count_findings(limit: Limit, recordings: Sequence[Recording]) -> Whole:
    """As `show` lists them: what several ranks found is one."""
    found: dict[Finding, int] = defaultdict(int)
    for one in (one for recording in recordings for one in recording.findings):
        is_severe = limit.severity is None or one.severity is limit.severity
        if is_severe and (not limit.rule or one.rule == limit.rule):
            found[replace(one, rank=None)] += 1
    return Whole(
        value=len(found),
        evidence=tuple(
            Evidence(
                what=f"{one.rule} in {one.subject}",
                cause=one.fact,
                source=one.source,
                remedy=one.remedy,
            )
            for one in sorted(found, key=lambda one: list(Severity).index(one.severity))
        ),
    )


def _count_gaps(recordings: Sequence[Recording]) -> Whole:
    gaps: dict[Gap, None] = dict.fromkeys(
        replace(gap, rank=None) for recording in recordings for gap in recording.gaps
    )
    evidence = tuple(Evidence(what=gap.place, cause=gap.fact) for gap in gaps)
    return Whole(value=len(gaps), evidence=evidence)
