"""What the compiler did in two recordings: graphs, breaks, recompilations, and verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from shardscope.record import BreakSite, Diagnosis, Explanation, Source
from shardscope.report.compare.changes import Area, AreaTotal, Change, Unit
from shardscope.report.compare.facts import Fact, match_facts
from shardscope.report.layout import plural

__all__ = [
    "compare_diagnoses",
    "compare_explanations",
    "total_diagnoses",
    "total_explanations",
]

Explanations = Sequence[Explanation]
Diagnoses = Sequence[Diagnosis]


def compare_explanations(before: Explanations, after: Explanations) -> Iterator[Change]:
    """Break sites by their line of code, wherever it moved; what else keeps a graph from one."""
    first, second = map(_take_first_ranks, (before, after))
    is_alone = len(first) == len(second) == 1  # then it is the same one, whatever it is called
    yield from match_facts(
        Area.GRAPH_BREAKS,
        *(
            [fact for one in some for fact in _list_facts(one, "" if is_alone else one.target)]
            for some in (first, second)
        ),
    )


def total_explanations(before: Explanations, after: Explanations) -> AreaTotal:
    """Graphs and lines that break them."""
    words = [_summarize(_take_first_ranks(one)) for one in (before, after)]
    return AreaTotal(area=Area.GRAPH_BREAKS, before=words[0], after=words[1])


def compare_diagnoses(before: Diagnoses, after: Diagnoses) -> Iterator[Change]:
    """What each function is under each backend."""
    is_alone = len(before) == len(after) == 1
    yield from match_facts(
        Area.DIAGNOSES,
        *([_diagnosis_fact(one, is_alone) for one in some] for some in (before, after)),
    )


def total_diagnoses(before: Diagnoses, after: Diagnoses) -> AreaTotal:
    """How many are wrong."""
    words = [
        f"{sum(one.condition.is_bad for one in some):,} of {len(some):,} wrong"
        for some in (before, after)
    ]
    return AreaTotal(area=Area.DIAGNOSES, before=words[0], after=words[1])


def _take_first_ranks(explanations: Explanations) -> Explanations:
    """Of each function those of its first rank; where ranks differ, a finding says so."""
    first: dict[str, int] = {}
    for one in explanations:
        first[one.target] = min(one.rank, first.get(one.target, one.rank))
    return [one for one in explanations if one.rank == first[one.target]]


def _summarize(explanations: Explanations) -> str:
    graphs = sum(one.num_graphs for one in explanations)
    sites = sum(one.num_break_sites for one in explanations)
    return f"{plural(graphs, 'graph')}, {plural(sites, 'break')}"


def _list_facts(one: Explanation, target: str) -> Iterator[Fact]:
    prefix = f"{target}: " if target else ""
    yield _count(f"{prefix}graphs", one.num_graphs, because="")
    for site in one.break_sites:
        yield _site_fact(site, prefix)
    recompiles = Counter(
        (again.function, again.description or again.guard) for again in one.recompiles
    )
    for (function, why), count in recompiles.items():
        yield _count(f"{prefix}recompilations of {function}", count, key=why, because=why)
    for frame in one.skipped_frames:
        what = f"{prefix}{'rest of ' if frame.is_rest else ''}{frame.function} not compiled"
        yield _count(what, 1, because=_add_place(frame.reason, frame.source))
    if one.failure:
        yield Fact(what=f"{prefix}failure", value=one.failure, unit=Unit.WORDS, badness=1)


def _count(what: str, count: int, *, key: str = "", because: str) -> Fact:
    return Fact(what=what, value=count, key=(what, key), badness=count, because=because)


def _site_fact(site: BreakSite, prefix: str) -> Fact:
    place = site.source
    name = PurePath(place.file).name
    # Lines move with whatever is written above them, and folders with the machine.
    line = place.text.strip() or place.line
    return Fact(
        what=f"{prefix}breaks at {name}:{place.line}",
        value=site.num_events,
        key=("site", prefix, name, place.function, line, site.reason),
        badness=site.num_events,
        because=": ".join(filter(None, [site.reason, place.text.strip()])),
    )


def _add_place(reason: str, source: Source | None) -> str:
    return reason if source is None else f"{reason} ({PurePath(source.file).name}:{source.line})"


def _diagnosis_fact(one: Diagnosis, is_alone: bool) -> Fact:
    blamed = " ".join(filter(None, [one.stage, one.part]))
    words = one.condition.replace("_", " ") + (f" ({blamed})" if blamed else "")
    return Fact(
        what=f"{one.target} with {one.backend}",
        key="only" if is_alone else None,
        value=words,
        unit=Unit.WORDS,
        badness=float(one.condition.is_bad),
        because=one.fact,
    )
