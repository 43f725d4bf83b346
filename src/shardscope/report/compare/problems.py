"""Findings and gaps of two recordings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardscope.record import Finding, Gap, Recording, Severity
from shardscope.report.compare.changes import Area, AreaTotal, Change, Unit
from shardscope.report.compare.facts import Fact, match_facts
from shardscope.report.compare.names import CleanNames
from shardscope.report.layout import plural

__all__ = ["compare_findings", "compare_gaps", "total_findings", "total_gaps"]

_BADNESS = {Severity.ERROR: 2.0, Severity.WARNING: 1.0, Severity.INFO: 0.0}


def compare_findings(
    before: Recording, after: Recording, names: tuple[CleanNames, CleanNames]
) -> Iterator[Change]:
    """Findings are the same if they say the same; else the same if rule and subject are."""
    first, second = (
        list(_list_findings(one.findings, clean))
        for one, clean in zip((before, after), names, strict=True)
    )
    said = {_identify(fact) for fact in first} & {_identify(fact) for fact in second}
    other = [[fact for fact in some if _identify(fact) not in said] for some in (first, second)]
    yield from match_facts(Area.FINDINGS, *other)


def compare_gaps(before: Sequence[Gap], after: Sequence[Gap]) -> Iterator[Change]:
    """What was not understood, or lost."""
    yield from match_facts(Area.GAPS, *map(_list_gaps, (before, after)))


def total_findings(before: Recording, after: Recording) -> AreaTotal:
    """How many of each severity, ranks not counted."""
    return AreaTotal(area=Area.FINDINGS, before=_count(before), after=_count(after))


def total_gaps(before: Sequence[Gap], after: Sequence[Gap]) -> AreaTotal:
    """How many, ranks not counted."""
    counts = [f"{len({(gap.place, gap.fact) for gap in gaps}):,}" for gaps in (before, after)]
    return AreaTotal(area=Area.GAPS, before=counts[0], after=counts[1])


def _identify(fact: Fact) -> tuple[object, ...]:
    return (fact.module, fact.what, fact.value)


def _place(rule: str, subject: str, known: set[str]) -> tuple[str | None, str]:
    """The module that a finding is about, where there is one, and what is left to say."""
    if subject in known:
        return subject, rule
    module, _, name = subject.rpartition(".")
    if module and module in known:
        return module, f"{rule} of {name}"
    return None, f"{rule} of {subject}"


def _list_findings(findings: Sequence[Finding], names: CleanNames) -> Iterator[Fact]:
    """One for all ranks that have it."""
    known = set(names.names)
    seen: set[tuple[str, ...]] = set()
    for one in findings:
        subject = names.clean(one.subject)
        key = (one.rule, subject, one.severity, one.fact)
        if key in seen:
            continue
        seen.add(key)
        module, what = _place(one.rule, subject, known)
        yield Fact(
            module=module,
            what=what,
            value=f"{one.severity}: {one.fact}",
            unit=Unit.WORDS,
            badness=_BADNESS[one.severity],
            because=f"→ {one.remedy}",
        )


def _list_gaps(gaps: Sequence[Gap]) -> Iterator[Fact]:
    for place, fact in dict.fromkeys((gap.place, gap.fact) for gap in gaps):
        yield Fact(what=place, key=(place, fact), value=fact, unit=Unit.WORDS, badness=1.0)


def _count(recording: Recording) -> str:
    found = {(one.rule, one.subject, one.severity, one.fact) for one in recording.findings}
    counts = {one: sum(severity is one for _, _, severity, _ in found) for one in Severity}
    words = [
        f"{count:,} {severity}" if severity is Severity.INFO else plural(count, severity)
        for severity, count in counts.items()
        if count
    ]
    return ", ".join(words) or "none"
