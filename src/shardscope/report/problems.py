"""What wants attention: findings, and gaps in what we understood."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from msgspec.structs import replace
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from shardscope.record import (
    Finding,
    Gap,
    Recording,
    Severity,
    count_ranks,
    list_ranks,
)
from shardscope.report.layout import make_text, make_title
from shardscope.report.lines import SourceLine
from shardscope.report.stops import render_stops

__all__ = [
    "SEVERITIES",
    "SEVERITY_STYLES",
    "describe_checks",
    "describe_no_gaps",
    "fold_problem_ranks",
    "render_problems",
    "sort_findings",
]

_MAX_SHOWN = 10
SEVERITY_STYLES = {
    Severity.ERROR: "bold red",
    Severity.WARNING: "bold yellow",
    Severity.INFO: "bold blue",
}
SEVERITIES = tuple(SEVERITY_STYLES)
"""The gravest first."""

# Verbs that look for problems of a program.
_CHECKS = ("trace", "audit", "coverage", "memory", "parity", "explain", "diagnose")

# What an audit was not given, by the check that needs it.
_LACKING = {"ties": "the ties before sharding", "step": "a step"}


def render_problems(recording: Recording) -> Iterator[RenderableType]:
    """Findings, most severe first, or the checks that found none; where ranks stopped; gaps."""
    findings = fold_problem_ranks(sort_findings(recording))
    if not findings:
        yield make_text(f"No findings ({describe_checks(recording)}).", "dim")
    yield from _render_some("Findings", [_render_finding(*item) for item in findings])
    yield from render_stops(recording)
    gaps = [_render_gap(*item) for item in fold_problem_ranks(recording.gaps)]
    yield from _render_some(
        "Gaps", gaps, "not recorded or not understood; --strict makes them fail"
    )


def describe_checks(*recordings: Recording) -> str:
    """`checked by: trace; not run: audit, coverage`: without findings, what that means."""
    names: dict[str, str] = {}
    for run in (one.run for one in recordings):
        names |= dict(zip(run.instruments, run.instruments, strict=True))
        num_ranks = count_ranks(run.ranks)
        if "trace" in run.instruments and num_ranks < run.world_size:
            names["trace"] = f"trace of {num_ranks:,} of {run.world_size:,} ranks"
        if "audit" in run.instruments and run.skipped_checks:
            lacking = [_LACKING.get(check, check) for check in run.skipped_checks]
            names["audit"] = f"audit without {', '.join(lacking)}"
    if not names:
        return "which checks ran was not recorded"
    missing = [check for check in _CHECKS if check not in names]
    ran = f"checked by: {', '.join(names.values())}"
    return f"{ran}; not run: {', '.join(missing)}" if missing else ran


def describe_no_gaps(recording: Recording) -> str:
    """What it means that there are no gaps."""
    if not recording.collectives:
        return "No gaps."
    return "No gaps: every collective was attributed."


def sort_findings(recording: Recording) -> tuple[Finding, ...]:
    """The gravest first."""
    return tuple(sorted(recording.findings, key=lambda one: SEVERITIES.index(one.severity)))


def _render_some(
    title: str, items: list[RenderableType], note: str = ""
) -> Iterator[RenderableType]:
    if not items:
        return
    yield make_title(f"{title} ({len(items):,})", note)
    yield from items[:_MAX_SHOWN]
    if len(items) > _MAX_SHOWN:
        more = f"… and {len(items) - _MAX_SHOWN:,} more: see shardscope export --to json"
        yield Text(more, "dim")


T = TypeVar("T", Finding, Gap)


def fold_problem_ranks(problems: Sequence[T]) -> list[tuple[T, list[int]]]:
    """Problems that differ by rank alone become one, with all the ranks."""
    ranks: dict[T, list[int]] = {}
    for problem in problems:
        found = ranks.setdefault(replace(problem, rank=None), [])
        if problem.rank is not None:
            found.append(problem.rank)
    return list(ranks.items())


def _render_finding(finding: Finding, ranks: list[int]) -> RenderableType:
    head = Text.assemble((f"{finding.severity} ", SEVERITY_STYLES[finding.severity]))
    head.append_text(make_text(finding.rule, "bold", width=60)).append("  ")
    head.append_text(make_text(finding.subject, width=120)).append_text(_name_ranks(ranks))
    body: list[RenderableType] = [
        make_text(finding.fact, width=1000),
        make_text(f"→ {finding.remedy}", "green"),
    ]
    if finding.source is not None:
        body.append(SourceLine(finding.source))
    return Group(head, Padding(Group(*body), (0, 0, 0, 2)))


def _render_gap(gap: Gap, ranks: list[int]) -> RenderableType:
    line = make_text(gap.place, "bold yellow", width=160).append_text(_name_ranks(ranks))
    return line.append(": ").append_text(make_text(gap.fact, width=600))


def _name_ranks(ranks: list[int]) -> Text:
    if not ranks:
        return Text()
    return make_text(f"  {'rank' if len(ranks) == 1 else 'ranks'} {list_ranks(ranks)}", "dim")
