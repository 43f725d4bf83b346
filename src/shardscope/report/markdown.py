"""A recording as Markdown, short enough for a comment on a pull request."""

from __future__ import annotations

from collections import defaultdict

from shardscope.record import (
    Explanation,
    Gap,
    MemoryKind,
    MemoryProfile,
    Recording,
    Severity,
)
from shardscope.report.compare.compare import compare
from shardscope.report.compare.markdown import write_changes
from shardscope.report.costliest import list_costs
from shardscope.report.figures import list_figures
from shardscope.report.fold import build_tree, fold_repeated_layers
from shardscope.report.heading import describe_scope, describe_traffic, list_run_facts
from shardscope.report.inert_markdown import make_code, make_prose
from shardscope.report.layout import format_share, plural
from shardscope.report.memory import ESTIMATE, describe_room, find_worst
from shardscope.report.paper import Paper
from shardscope.report.problems import describe_checks
from shardscope.report.traffic import RankClass, Tally, add_up, fold_ranks, name_axis, tally
from shardscope.report.units import format_bytes

__all__ = ["render_markdown"]

_MAX_FINDINGS = 20
_MAX_GAPS = 10
_MAX_MODULES = 10
_MAX_SITES = 20
_MAX_SUMS = 30
_TRACE = "trace"
# What has no section here, or a short one.
_TOLD_IN_FIGURES = ("sharding", "coverage", "compiler", "proof")
_MARKS = {Severity.ERROR: "🔴", Severity.WARNING: "🟡", Severity.INFO: "🔵"}


def render_markdown(
    recording: Recording,
    *,
    against: Recording | None = None,
    titles: tuple[str, str] = ("before", "after"),
) -> str:
    """What ran, what was found and what it cost; `against` adds what changed since that one."""
    paper = Paper()
    classes = fold_ranks(recording)
    _write_heading(paper, recording, classes)
    if against is not None:
        write_changes(paper, compare(against, recording, titles=titles))
    _write_findings(paper, recording)
    if recording.collectives:
        _write_traffic(paper, recording, classes)
    if recording.memory:
        _write_memory(paper, recording.memory)
    for explanation in _take_first_rank(recording.explanations):
        _write_breaks(paper, explanation)
    _write_gaps(paper, recording.gaps)
    return paper.render()


def _write_heading(paper: Paper, recording: Recording, classes: tuple[RankClass, ...]) -> None:
    root = next((one.type for one in recording.modules if not one.name), "")
    paper.add(f"## shardscope{': ' if root else ''}{make_code(root) if root else ''}")
    paper.add(" · ".join(make_prose(fact, width=120) for fact in list_run_facts(recording)))
    if recording.collectives:
        paper.add(make_prose(describe_traffic(recording, classes).plain))
    elif _TRACE in recording.run.instruments:
        paper.add("No collectives were issued while it was traced.")
    figures = [one for one in list_figures(recording, classes) if one.view in _TOLD_IN_FIGURES]
    paper.add_list(figures, lambda one: f"{one.view}: {make_prose(one.words)}", most=len(figures))


def _write_findings(paper: Paper, recording: Recording) -> None:
    # Ranks find the same.
    known = dict.fromkeys(
        (one.severity, one.rule, one.subject, one.fact, one.remedy) for one in recording.findings
    )
    if not known:
        paper.add(f"No findings ({make_prose(describe_checks(recording))}).")
        return
    paper.add(f"### Findings ({len(known):,})")
    order = list(_MARKS)
    ranked = sorted(known, key=lambda one: order.index(one[0]))
    paper.add_list(ranked, lambda one: _describe_finding(*one), most=_MAX_FINDINGS)


def _describe_finding(severity: Severity, rule: str, subject: str, fact: str, remedy: str) -> str:
    head = f"{_MARKS[severity]} **{severity}** {make_code(rule)} {make_code(subject)}"
    return f"{head}: {make_prose(fact)}<br>→ {make_prose(remedy)}"


def _write_traffic(paper: Paper, recording: Recording, classes: tuple[RankClass, ...]) -> None:
    whose = "of the busiest rank" if len(classes) > 1 else "per rank"
    scope = ", ".join(filter(None, [whose, describe_scope(recording)]))
    paper.add(f"### Collectives ({make_prose(scope)})")
    _write_sums(paper, recording, classes)
    roots = tuple(fold_repeated_layers(root) for root in build_tree(recording, classes))
    costs = list_costs(roots)
    whole = sum(cost.wire_bytes for cost in costs)
    paper.add("**Most expensive modules**, excluding children")
    paper.add_table(
        ["module", ">count", ">sent", ">share"],
        costs,
        lambda cost: [
            make_code(cost.name),
            f"{cost.own.count * cost.repeat:,}",
            format_bytes(cost.wire_bytes),
            format_share(cost.wire_bytes, whole),
        ],
        most=_MAX_MODULES,
    )


def _write_sums(paper: Paper, recording: Recording, classes: tuple[RankClass, ...]) -> None:
    busiest = max(classes, key=lambda one: add_up(map(tally, one.calls)).wire_bytes)
    sums: dict[tuple[str, str], Tally] = defaultdict(Tally)
    for call in busiest.calls:
        sums[name_axis(call, recording.run.world_size), call.kind] += tally(call)
    whole = add_up(sums.values())
    ranked = sorted(sums.items(), key=lambda item: (-item[1].wire_bytes, item[0]))
    paper.add_table(
        ["axis", "kind", ">count", ">input", ">sent (ring estimate)", ">share"],
        ranked,
        lambda item: [
            make_code(item[0][0]),
            item[0][1],
            f"{item[1].count:,}",
            format_bytes(item[1].input_bytes),
            format_bytes(item[1].wire_bytes),
            format_share(item[1].wire_bytes, whole.wire_bytes),
        ],
        most=_MAX_SUMS,
    )


def _write_memory(paper: Paper, profiles: tuple[MemoryProfile, ...]) -> None:
    worst = find_worst(profiles)
    paper.add(f"### Memory, rank {worst.rank} ({ESTIMATE})")
    facts = [f"**{format_bytes(worst.peak_bytes)}** at the peak, in {worst.peak_phase}"]
    if worst.first_peak_bytes is not None:
        facts.append(f"first step {format_bytes(worst.first_peak_bytes)}")
    if worst.reserved_bytes is not None:
        facts.append(f"reserved {format_bytes(worst.reserved_bytes)}")
    if worst.device_bytes is not None:
        room = make_prose(describe_room(worst.device_bytes, worst.needed_bytes).plain)
        facts.append(room.replace("does not fit", "**does not fit**"))
    paper.add(" · ".join(facts))
    held = {
        kind: sum(use.num_bytes for use in worst.at_peak if use.kind is kind) for kind in MemoryKind
    }
    paper.add_table(
        ["at the peak", ">bytes", ">share"],
        [(kind.replace("_", " "), size) for kind, size in held.items() if size],
        lambda item: [item[0], format_bytes(item[1]), format_share(item[1], worst.peak_bytes)],
    )


def _take_first_rank(explanations: tuple[Explanation, ...]) -> list[Explanation]:
    rank = min((one.rank for one in explanations), default=0)
    return [one for one in explanations if one.rank == rank]


def _write_breaks(paper: Paper, explanation: Explanation) -> None:
    name = f": {make_code(explanation.target)}" if explanation.target else ""
    paper.add(f"### torch.compile{name}")
    counts = [
        plural(explanation.num_graphs, "graph"),
        _count_sites(explanation.num_break_sites),
        plural(explanation.num_recompiles, "recompilation"),
        plural(explanation.num_skipped_frames, "skipped function"),
    ]
    paper.add(", ".join(counts))
    if explanation.break_sites:
        paper.add_table(
            ["line", ">×", "why"],
            explanation.break_sites,
            lambda site: [
                make_code(f"{site.source.file}:{site.source.line}"),
                f"{site.num_events:,}",
                make_prose(site.reason),
            ],
            most=_MAX_SITES,
        )


def _count_sites(count: int) -> str:
    return "1 line that breaks graphs" if count == 1 else f"{count:,} lines that break graphs"


def _write_gaps(paper: Paper, gaps: tuple[Gap, ...]) -> None:
    known = dict.fromkeys((gap.place, gap.fact) for gap in gaps)
    if known:
        paper.add(f"### Gaps ({len(known):,})")
        paper.add_list(
            list(known), lambda gap: f"{make_code(gap[0])}: {make_prose(gap[1])}", most=_MAX_GAPS
        )
