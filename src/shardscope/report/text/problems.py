"""Findings and gaps, and the last collective of each rank if the recording ended early."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TypeVar

from msgspec.structs import replace
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from shardscope.record import (
    Collective,
    Finding,
    Gap,
    Recording,
    Severity,
    Stop,
    count_ranks,
    list_ranks,
)
from shardscope.record.base import name_line
from shardscope.record.recording import list_calls_by_group
from shardscope.record.units import format_bytes
from shardscope.report.model.finding_groups import SEVERITIES
from shardscope.report.text.style import SourceLine, make_text, make_title
from shardscope.report.text.table import Column, ColumnStyle, Grid, Row, narrower_layouts

_MAX_ROWS = 30
_COLUMNS = {
    "group": Column("group", ColumnStyle.NAME, 8),
    "ranks": Column("ranks", ColumnStyle.NAME, 5),
    "issued": Column("issued"),
    "last": Column("last collective", ColumnStyle.NAME, 10),
    "line": Column("line", ColumnStyle.NAME, 14),
    "then": Column("then", ColumnStyle.NAME, 8),
}

# Number of calls, the last call, its source line, and how the rank stopped.
_StopLocation = tuple[int, str, str, str]


def render_stops(recording: Recording) -> Iterator[RenderableType]:
    """Render where each rank stopped, if a rank was killed or raised an error."""
    is_alone = count_ranks(recording.run.ranks) < 2
    if all(is_alone and stop.error is not None for stop in recording.stops):
        return
    locations = _find_stop_locations(recording)
    # Groups in which ranks differ come first: there, ranks are waiting.
    names = sorted(
        locations, key=lambda name: len({location[0] for location in locations[name]}) < 2
    )
    rows: list[Row] = []
    for name in names:
        for location, ranks in sorted(locations[name].items(), reverse=True):
            num_calls, last, line, then = location
            rows.append(
                {
                    "group": make_text(name),
                    "ranks": make_text(list_ranks(ranks)),
                    "issued": f"{num_calls:,}",
                    "last": make_text(last),
                    "line": make_text(line),
                    "then": make_text(then),
                }
            )
    if not rows:
        return
    yield make_title("Where the ranks stopped", "calls issued in each group, and the last of them")
    num_hidden = len(rows) - _MAX_ROWS
    yield Grid(
        _COLUMNS,
        rows[:_MAX_ROWS],
        narrower_layouts(list(_COLUMNS), "last", "then"),
        note=f"… {num_hidden:,} more rows" if num_hidden > 0 else "",
    )


def _find_stop_locations(recording: Recording) -> dict[str, dict[_StopLocation, list[int]]]:
    """Map each group to the locations where its ranks stopped."""
    stops = {stop.rank: stop for stop in recording.stops}
    locations: dict[str, dict[_StopLocation, list[int]]] = {}
    for name, by_rank in list_calls_by_group(recording).items():
        ranks_by_location: dict[_StopLocation, list[int]] = defaultdict(list)
        for rank, rank_calls in by_rank.items():
            ranks_by_location[
                (*_describe_last(rank_calls), _describe_stop(stops.get(rank)))
            ].append(rank)
        locations[name] = ranks_by_location
    return locations


def _describe_last(calls: list[Collective]) -> tuple[int, str, str]:
    if not calls:
        return 0, "", ""
    last = max(calls, key=lambda call: call.order)
    words = [str(last.kind), format_bytes(max(last.input_bytes, last.output_bytes))]
    if last.peer is not None:
        words.append(f"peer {last.peer}")
    return len(calls), " ".join(words), name_line(last.source)


def _describe_stop(stop: Stop | None) -> str:
    if stop is None:
        return "left the trace"
    if not stop.is_gapless:
        return "records lost"
    if stop.error is not None:
        return f"raised {stop.error.partition(':')[0]}"
    phases = [begin.name for begin in stop.open_spans if not begin.thread]
    return f"stopped in {' > '.join(phases)}" if phases else "stopped"


_MAX_SHOWN = 10
SEVERITY_STYLES = {
    Severity.ERROR: "bold red",
    Severity.WARNING: "bold yellow",
    Severity.INFO: "bold blue",
}

# Instruments that check a program for problems.
_CHECKS = ("trace", "audit", "coverage", "memory", "parity", "explain", "diagnose")

# Inputs that an audit did not get, by the check that needs them.
_LACKING = {"ties": "the ties before sharding", "step": "a step"}


def render_problems(recording: Recording) -> Iterator[RenderableType]:
    """Render findings or the checks that had none, then where ranks stopped, and gaps."""
    findings = fold_problem_ranks(sort_findings(recording))
    if not findings:
        yield make_text(f"No findings ({describe_checks(recording)}).", "dim")
    yield from _render_first("Findings", [render_finding(*item) for item in findings])
    yield from render_stops(recording)
    yield from render_gaps(recording)


def render_gaps(recording: Recording) -> Iterator[RenderableType]:
    """Render what was not recorded or not understood."""
    gaps = [_render_gap(*item) for item in fold_problem_ranks(recording.gaps)]
    yield from _render_first(
        "Gaps", gaps, "not recorded or not understood; --strict makes them fail"
    )


def describe_checks(*recordings: Recording) -> str:
    """Describe what the absence of findings means: `checked by: trace; not run: audit`."""
    names: dict[str, str] = {}
    for run in (recording.run for recording in recordings):
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
    """Describe what the absence of gaps means."""
    if not recording.collectives:
        return "No gaps."
    return "No gaps: every collective was attributed."


def sort_findings(recording: Recording) -> tuple[Finding, ...]:
    """Sort findings, most severe first."""
    return tuple(sorted(recording.findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def _render_first(
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
    """Join problems that differ only in rank, each with all of its ranks."""
    ranks: dict[T, list[int]] = {}
    for problem in problems:
        same_ranks = ranks.setdefault(replace(problem, rank=None), [])
        if problem.rank is not None:
            same_ranks.append(problem.rank)
    return list(ranks.items())


def render_finding(finding: Finding, ranks: Sequence[int] = ()) -> RenderableType:
    """Render a finding with its remedy and line; `ranks` are those that have the same."""
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


def _name_ranks(ranks: Sequence[int]) -> Text:
    if not ranks:
        return Text()
    return make_text(f"  {'rank' if len(ranks) == 1 else 'ranks'} {list_ranks(ranks)}", "dim")
