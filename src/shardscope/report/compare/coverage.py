"""Verdicts on ops in two recordings, at each level."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from shardscope.record import Coverage, OpCoverage, Verdict
from shardscope.report.compare.changes import Area, AreaTotal, Change, Unit
from shardscope.report.compare.facts import Fact, match_facts
from shardscope.report.compare.names import CleanNames

__all__ = ["compare_coverage", "total_coverage"]

Levels = Sequence[Coverage]

# Whether an op moves something first is the least of worries; that it cannot run is the greatest.
_BADNESS = {
    Verdict.LOCAL: 0,
    Verdict.SHARDED: 0,
    Verdict.DECOMPOSED: 0,
    Verdict.REDISTRIBUTED: 1,
    Verdict.REPLICATED: 2,
    Verdict.MISSING: 3,
    Verdict.WRONG: 4,
}
_COVERED = 1


def compare_coverage(
    before: Levels, after: Levels, names: tuple[CleanNames, CleanNames]
) -> Iterator[Change]:
    """A change for each op that has another verdict, or that only one model has."""
    yield from match_facts(
        Area.COVERAGE,
        *(
            list(_list_facts(some, clean))
            for some, clean in zip((before, after), names, strict=True)
        ),
    )


def total_coverage(before: Levels, after: Levels) -> AreaTotal:
    """Ops that shard, of those of the first level."""
    words = [_summarize(_first_rank(some)[0]) for some in (before, after)]
    return AreaTotal(area=Area.COVERAGE, before=words[0], after=words[1])


def _summarize(coverage: Coverage) -> str:
    judged = [op for op in coverage.ops if op.verdict is not Verdict.LOCAL]
    covered = sum(_BADNESS[op.verdict] <= _COVERED for op in judged)
    num_local = len(coverage.ops) - len(judged)
    local = f", {num_local:,} on local tensors" if num_local else ""
    return f"{covered:,} of {len(judged):,} ops shard{local}"


def _first_rank(levels: Levels) -> list[Coverage]:
    rank = min(one.rank for one in levels)
    return [one for one in levels if one.rank == rank]


def _list_facts(levels: Levels, names: CleanNames) -> Iterator[Fact]:
    mine = _first_rank(levels)
    times = Counter(one.level for one in mine)
    for one in mine:
        mesh = " × ".join(f"{axis.name}={axis.size:,}" for axis in one.axes)
        place = f"{one.level} on {mesh}" if times[one.level] > 1 else str(one.level)
        for op in one.ops:
            yield _op_fact(op, place, tuple(names.clean(name) for name in op.modules))


def _op_fact(op: OpCoverage, place: str, modules: tuple[str, ...]) -> Fact:
    return Fact(
        what=f"{op.op} ({place})",
        modules=modules,
        value=str(op.verdict),
        unit=Unit.WORDS,
        badness=_BADNESS[op.verdict],
        because=op.detail,
    )
