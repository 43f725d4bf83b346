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
from shardscope.record.recording import name_axis
from shardscope.record.traffic import (
    TrafficTotals,
    count_traffic,
    sum_traffic,
)
from shardscope.record.units import format_bytes, plural
from shardscope.report.compare.changes_markdown import write_changes
from shardscope.report.compare.compare_recordings import compare
from shardscope.report.model.memory_peaks import find_worst
from shardscope.report.model.module_tree import build_tree, fold_repeated_layers
from shardscope.report.model.traffic_totals import (
    IdenticalRanks,
    find_busiest_ranks,
    fold_ranks,
)
from shardscope.report.text.communication import list_costs
from shardscope.report.text.heading import describe_scope, describe_traffic, list_run_facts
from shardscope.report.text.key_metrics import list_key_metrics
from shardscope.report.text.markdown_text import BoundedMarkdown, make_code, make_prose
from shardscope.report.text.memory_profile import (
    describe_basis,
    describe_room,
)
from shardscope.report.text.problems import describe_checks
from shardscope.report.text.style import format_share

_MAX_FINDINGS = 20
_MAX_GAPS = 10
_MAX_MODULES = 10
_MAX_SITES = 20
_MAX_SUMS = 30
_TRACE = "trace"
# Views that have no section here, or a short one.
_METRIC_VIEWS = ("sharding", "coverage", "compiler", "proof")
_MARKS = {Severity.ERROR: "🔴", Severity.WARNING: "🟡", Severity.INFO: "🔵"}


def render_markdown(
    recording: Recording,
    *,
    against: Recording | None = None,
    titles: tuple[str, str] = ("before", "after"),
) -> str:
    """Render the run, its findings and costs; `against` adds what changed since that recording."""
    document = BoundedMarkdown()
    rank_sets = fold_ranks(recording)
    _write_heading(document, recording, rank_sets)
    if against is not None:
        write_changes(document, compare(against, recording, titles=titles))
    _write_findings(document, recording)
    if recording.collectives:
        _write_traffic(document, recording, rank_sets)
    if recording.memory:
        _write_memory(document, recording.memory)
    for explanation in _take_first_rank(recording.explanations):
        _write_breaks(document, explanation)
    _write_gaps(document, recording.gaps)
    return document.render()


def _write_heading(
    document: BoundedMarkdown, recording: Recording, rank_sets: tuple[IdenticalRanks, ...]
) -> None:
    root = next((module.type for module in recording.modules if not module.name), "")
    document.add(f"## shardscope{': ' if root else ''}{make_code(root) if root else ''}")
    document.add(" · ".join(make_prose(fact, width=120) for fact in list_run_facts(recording)))
    if recording.collectives:
        document.add(make_prose(describe_traffic(recording, rank_sets).plain))
    elif _TRACE in recording.run.instruments:
        document.add("No collectives were issued while it was traced.")
    metrics = [
        metric for metric in list_key_metrics(recording, rank_sets) if metric.view in _METRIC_VIEWS
    ]
    document.add_list(
        metrics, lambda metric: f"{metric.view}: {make_prose(metric.words)}", most=len(metrics)
    )


def _write_findings(document: BoundedMarkdown, recording: Recording) -> None:
    # Several ranks may report the same finding.
    known = dict.fromkeys(
        (finding.severity, finding.rule, finding.subject, finding.fact, finding.remedy)
        for finding in recording.findings
    )
    if not known:
        document.add(f"No findings ({make_prose(describe_checks(recording))}).")
        return
    document.add(f"### Findings ({len(known):,})")
    order = list(_MARKS)
    ranked = sorted(known, key=lambda entry: order.index(entry[0]))
    document.add_list(ranked, lambda entry: _describe_finding(*entry), most=_MAX_FINDINGS)


def _describe_finding(severity: Severity, rule: str, subject: str, fact: str, remedy: str) -> str:
    head = f"{_MARKS[severity]} **{severity}** {make_code(rule)} {make_code(subject)}"
    return f"{head}: {make_prose(fact)}<br>→ {make_prose(remedy)}"


def _write_traffic(
    document: BoundedMarkdown, recording: Recording, rank_sets: tuple[IdenticalRanks, ...]
) -> None:
    whose = "of the busiest rank" if len(rank_sets) > 1 else "per rank"
    scope = ", ".join(filter(None, [whose, describe_scope(recording)]))
    document.add(f"### Collectives ({make_prose(scope)})")
    _write_sums(document, recording, rank_sets)
    roots = tuple(fold_repeated_layers(root) for root in build_tree(recording, rank_sets))
    costs = list_costs(roots)
    total_bytes = sum(cost.wire_bytes for cost in costs)
    document.add("**Most expensive modules**, excluding children")
    document.add_table(
        ["module", ">count", ">sent", ">share"],
        costs,
        lambda cost: [
            make_code(cost.name),
            f"{cost.own.count * cost.repeat:,}",
            format_bytes(cost.wire_bytes),
            format_share(cost.wire_bytes, total_bytes),
        ],
        most=_MAX_MODULES,
    )


def _write_sums(
    document: BoundedMarkdown, recording: Recording, rank_sets: tuple[IdenticalRanks, ...]
) -> None:
    busiest = rank_sets[find_busiest_ranks(rank_sets)]
    sums: dict[tuple[str, str], TrafficTotals] = defaultdict(TrafficTotals)
    for call in busiest.calls:
        sums[name_axis(call, recording.run.world_size), call.kind] += count_traffic(call)
    total = sum_traffic(sums.values())
    ranked = sorted(sums.items(), key=lambda item: (-item[1].wire_bytes, item[0]))
    document.add_table(
        ["axis", "kind", ">count", ">input", ">sent (ring estimate)", ">share"],
        ranked,
        lambda item: [
            make_code(item[0][0]),
            item[0][1],
            f"{item[1].count:,}",
            format_bytes(item[1].input_bytes),
            format_bytes(item[1].wire_bytes),
            format_share(item[1].wire_bytes, total.wire_bytes),
        ],
        most=_MAX_SUMS,
    )


def _write_memory(document: BoundedMarkdown, profiles: tuple[MemoryProfile, ...]) -> None:
    worst = find_worst(profiles)
    document.add(f"### Memory, rank {worst.rank} ({describe_basis(worst)})")
    facts = [f"**{format_bytes(worst.peak_bytes)}** at the peak, in {worst.peak_phase}"]
    if worst.first_peak_bytes is not None:
        facts.append(f"first step {format_bytes(worst.first_peak_bytes)}")
    if worst.reserved_bytes is not None:
        facts.append(f"reserved {format_bytes(worst.reserved_bytes)}")
    if worst.device_bytes is not None:
        room = make_prose(describe_room(worst.device_bytes, worst.needed_bytes).plain)
        facts.append(room.replace("does not fit", "**does not fit**"))
    document.add(" · ".join(facts))
    modules_at_peak = {
        kind: sum(use.num_bytes for use in worst.at_peak if use.kind is kind) for kind in MemoryKind
    }
    document.add_table(
        ["at the peak", ">bytes", ">share"],
        [(kind.replace("_", " "), size) for kind, size in modules_at_peak.items() if size],
        lambda item: [item[0], format_bytes(item[1]), format_share(item[1], worst.peak_bytes)],
    )


def _take_first_rank(explanations: tuple[Explanation, ...]) -> list[Explanation]:
    rank = min((explanation.rank for explanation in explanations), default=0)
    return [explanation for explanation in explanations if explanation.rank == rank]


def _write_breaks(document: BoundedMarkdown, explanation: Explanation) -> None:
    name = f": {make_code(explanation.target)}" if explanation.target else ""
    document.add(f"### torch.compile{name}")
    counts = [
        plural(explanation.num_graphs, "graph"),
        _count_sites(explanation.num_break_sites),
        plural(explanation.num_recompiles, "recompilation"),
        plural(explanation.num_skipped_frames, "skipped function"),
    ]
    document.add(", ".join(counts))
    if explanation.break_sites:
        document.add_table(
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


def _write_gaps(document: BoundedMarkdown, gaps: tuple[Gap, ...]) -> None:
    known = dict.fromkeys((gap.place, gap.fact) for gap in gaps)
    if known:
        document.add(f"### Gaps ({len(known):,})")
        document.add_list(
            list(known), lambda gap: f"{make_code(gap[0])}: {make_prose(gap[1])}", most=_MAX_GAPS
        )
