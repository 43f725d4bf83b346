"""Changes of graphs, breaks, recompilations and compiler verdicts, and of op coverage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from shardscope.record import (
    BreakSite,
    Coverage,
    Diagnosis,
    Explanation,
    OpCoverage,
    OpVerdict,
    Source,
)
from shardscope.record.units import plural
from shardscope.report.compare.changes import Area, AreaTotal, Change, Unit
from shardscope.report.compare.facts import CleanNames, Fact, match_facts

Explanations = Sequence[Explanation]
Diagnoses = Sequence[Diagnosis]


def compare_explanations(before: Explanations, after: Explanations) -> Iterator[Change]:
    """Compare graphs and break sites; sites match by their code, even if the line has moved."""
    first, second = map(_take_first_ranks, (before, after))
    is_alone = len(first) == len(second) == 1  # compared even if renamed
    yield from match_facts(
        Area.GRAPH_BREAKS,
        *(
            [
                fact
                for explanation in explanations
                for fact in _list_compiler_facts(
                    explanation, "" if is_alone else explanation.target
                )
            ]
            for explanations in (first, second)
        ),
    )


def total_explanations(before: Explanations, after: Explanations) -> AreaTotal:
    """Count graphs and the lines that break them."""
    words = [
        _summarize_compiler(_take_first_ranks(explanations)) for explanations in (before, after)
    ]
    return AreaTotal(area=Area.GRAPH_BREAKS, before=words[0], after=words[1])


def compare_diagnoses(before: Diagnoses, after: Diagnoses) -> Iterator[Change]:
    """Compare the diagnosis of each function under each backend."""
    is_alone = len(before) == len(after) == 1
    yield from match_facts(
        Area.DIAGNOSES,
        *(
            [_diagnosis_fact(diagnosis, is_alone) for diagnosis in diagnoses]
            for diagnoses in (before, after)
        ),
    )


def total_diagnoses(before: Diagnoses, after: Diagnoses) -> AreaTotal:
    """Count wrong results of compiled functions."""
    words = [
        f"{sum(entry.condition.is_bad for entry in diagnoses):,} of {len(diagnoses):,} wrong"
        for diagnoses in (before, after)
    ]
    return AreaTotal(area=Area.DIAGNOSES, before=words[0], after=words[1])


def _take_first_ranks(explanations: Explanations) -> Explanations:
    """Keep each function's explanation of its first rank; if ranks differ, a finding reports it."""
    first: dict[str, int] = {}
    for explanation in explanations:
        first[explanation.target] = min(
            explanation.rank, first.get(explanation.target, explanation.rank)
        )
    return [
        explanation for explanation in explanations if explanation.rank == first[explanation.target]
    ]


def _summarize_compiler(explanations: Explanations) -> str:
    graphs = sum(explanation.num_graphs for explanation in explanations)
    sites = sum(explanation.num_break_sites for explanation in explanations)
    return f"{plural(graphs, 'graph')}, {plural(sites, 'break')}"


def _list_compiler_facts(explanation: Explanation, target: str) -> Iterator[Fact]:
    prefix = f"{target}: " if target else ""
    yield _count(f"{prefix}graphs", explanation.num_graphs, because="")
    for site in explanation.break_sites:
        yield _site_fact(site, prefix)
    recompiles = Counter(
        (again.function, again.description or again.guard) for again in explanation.recompiles
    )
    for (function, why), count in recompiles.items():
        yield _count(f"{prefix}recompilations of {function}", count, key=why, because=why)
    for frame in explanation.skipped_frames:
        label = f"{prefix}{'rest of ' if frame.is_rest else ''}{frame.function} not compiled"
        yield _count(label, 1, because=_append_source(frame.reason, frame.source))
    if explanation.failure:
        yield Fact(what=f"{prefix}failure", value=explanation.failure, unit=Unit.WORDS, badness=1)


def _count(label: str, count: int, *, key: str = "", because: str) -> Fact:
    return Fact(what=label, value=count, key=(label, key), badness=count, because=because)


def _site_fact(site: BreakSite, prefix: str) -> Fact:
    source = site.source
    name = PurePath(source.file).name
    # Line numbers shift when code above is edited, and folders differ between machines.
    line = source.text.strip() or source.line
    return Fact(
        what=f"{prefix}breaks at {name}:{source.line}",
        value=site.num_events,
        key=("site", prefix, name, source.function, line, site.reason),
        badness=site.num_events,
        because=": ".join(filter(None, [site.reason, source.text.strip()])),
        source=source,
    )


def _append_source(reason: str, source: Source | None) -> str:
    return reason if source is None else f"{reason} ({PurePath(source.file).name}:{source.line})"


def _diagnosis_fact(diagnosis: Diagnosis, is_alone: bool) -> Fact:
    blamed = " ".join(filter(None, [diagnosis.stage, diagnosis.part]))
    words = diagnosis.condition.replace("_", " ") + (f" ({blamed})" if blamed else "")
    return Fact(
        what=f"{diagnosis.target} with {diagnosis.backend}",
        key="only" if is_alone else None,
        value=words,
        unit=Unit.WORDS,
        badness=float(diagnosis.condition.is_bad),
        because=diagnosis.fact,
    )


Levels = Sequence[Coverage]

# From harmless to severe: an op that redistributes its inputs is the least, one that fails the
# worst.
_BADNESS = {
    OpVerdict.LOCAL: 0,
    OpVerdict.SHARDED: 0,
    OpVerdict.DECOMPOSED: 0,
    OpVerdict.REDISTRIBUTED: 1,
    OpVerdict.REPLICATED: 2,
    OpVerdict.MISSING: 3,
    OpVerdict.WRONG: 4,
}
_COVERED = 1


def compare_coverage(
    before: Levels, after: Levels, names: tuple[CleanNames, CleanNames]
) -> Iterator[Change]:
    """Compare the verdict of each op, and list ops that only one model has."""
    yield from match_facts(
        Area.COVERAGE,
        *(
            list(_list_coverage_facts(levels, clean))
            for levels, clean in zip((before, after), names, strict=True)
        ),
    )


def total_coverage(before: Levels, after: Levels) -> AreaTotal:
    """Count the ops that shard, of the first level."""
    words = [_summarize_coverage(_first_rank(levels)[0]) for levels in (before, after)]
    return AreaTotal(area=Area.COVERAGE, before=words[0], after=words[1])


def _summarize_coverage(coverage: Coverage) -> str:
    judged = [op for op in coverage.ops if op.verdict is not OpVerdict.LOCAL]
    covered = sum(_BADNESS[op.verdict] <= _COVERED for op in judged)
    num_local = len(coverage.ops) - len(judged)
    local = f", {num_local:,} on local tensors" if num_local else ""
    return f"{covered:,} of {len(judged):,} ops shard{local}"


def _first_rank(levels: Levels) -> list[Coverage]:
    rank = min(coverage.rank for coverage in levels)
    return [coverage for coverage in levels if coverage.rank == rank]


def _list_coverage_facts(levels: Levels, names: CleanNames) -> Iterator[Fact]:
    rank_levels = _first_rank(levels)
    times = Counter(coverage.level for coverage in rank_levels)
    for coverage in rank_levels:
        mesh = " × ".join(f"{axis.name}={axis.size:,}" for axis in coverage.axes)
        level_name = (
            f"{coverage.level} on {mesh}" if times[coverage.level] > 1 else str(coverage.level)
        )
        for op in coverage.ops:
            yield _op_fact(op, level_name, tuple(names.clean(name) for name in op.modules))


def _op_fact(op: OpCoverage, level_name: str, modules: tuple[str, ...]) -> Fact:
    return Fact(
        what=f"{op.op} ({level_name})",
        modules=modules,
        value=str(op.verdict),
        unit=Unit.WORDS,
        badness=_BADNESS[op.verdict],
        because=op.detail,
    )
