"""Data of the overview: the run, key metrics, findings and gaps."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from shardscope.record import Finding, Recording, compress_ranks, format_ranks
from shardscope.record.layer_names import fold_layers_in_text, join_layers_in_texts
from shardscope.record.units import plural
from shardscope.report.html.module_rows import FindingTargets
from shardscope.report.html.page import Fact, FindingItem, GapItem, RunFacts
from shardscope.report.html.page_index import NOWHERE, Index
from shardscope.report.model.traffic_totals import IdenticalRanks
from shardscope.report.text.heading import describe_reality, describe_scope, name_mesh, name_ranks
from shardscope.report.text.key_metrics import list_key_metrics
from shardscope.report.text.problems import (
    SEVERITIES,
    describe_checks,
    describe_no_gaps,
    fold_problem_ranks,
)

_MAX_TITLE = 120


def make_run(recording: Recording) -> RunFacts:
    """Describe the run."""
    run = recording.run
    return RunFacts(
        title=_name_page(recording),
        mesh=run.axes,
        world_size=run.world_size,
        ranks=name_ranks(run),
        world=describe_reality(recording),
        torch_version=run.torch_version,
        shardscope_version=run.shardscope_version,
        command=run.command,
        instruments=run.instruments,
        checks=describe_checks(recording),
        no_gaps=describe_no_gaps(recording),
        scope=describe_scope(recording),
        num_forwards=run.num_forwards,
    )


def _name_page(recording: Recording) -> str:
    """Return the title of the page: `Llama on dp=128 × tp=8`."""
    subject = next(filter(None, _name_subjects(recording)), "A recording")
    mesh = name_mesh(recording.run.axes)
    if not mesh and recording.run.world_size > 1:
        mesh = plural(recording.run.world_size, "rank")
    return (f"{subject} on {mesh}" if mesh else subject)[:_MAX_TITLE]


def _name_subjects(recording: Recording) -> Iterator[str]:
    yield from (module.type for module in recording.modules if not module.name)
    yield from (program.program for program in recording.parallel)
    yield from (explanation.target for explanation in recording.explanations)
    yield from (diagnosis.target for diagnosis in recording.diagnoses)
    yield from (layout.name for layout in recording.layouts)


def make_facts(recording: Recording, rank_sets: tuple[IdenticalRanks, ...]) -> tuple[Fact, ...]:
    """List the key metrics, each with the view that shows more of it."""
    return tuple(
        Fact(label=card.label, value=card.value, note=card.note, view=metric.view)
        for metric in list_key_metrics(recording, rank_sets)
        for card in metric.cards
    )


def make_findings(
    recording: Recording, index: Index, subjects: FindingTargets
) -> tuple[FindingItem, ...]:
    """List findings; those that differ only in rank or layer share an item."""
    groups: dict[Hashable, list[Finding]] = {}
    for finding in recording.findings:
        groups.setdefault(_group_key(finding), []).append(finding)
    items = [_make_finding(group, index, subjects) for group in groups.values()]
    order = {str(severity): at for at, severity in enumerate(SEVERITIES)}
    return tuple(sorted(items, key=lambda item: order[item.severity]))


def _group_key(finding: Finding) -> Hashable:
    texts = tuple(map(fold_layers_in_text, (finding.subject, finding.fact, finding.remedy)))
    return finding.rule, finding.severity, texts, finding.source


def _make_finding(group: Sequence[Finding], index: Index, subjects: FindingTargets) -> FindingItem:
    first = group[0]
    ranks = sorted({finding.rank for finding in group if finding.rank is not None})
    return FindingItem(
        rule=first.rule,
        severity=first.severity,
        subject=join_layers_in_texts([finding.subject for finding in group]),
        fact=join_layers_in_texts([finding.fact for finding in group]),
        remedy=join_layers_in_texts([finding.remedy for finding in group]),
        ranks=_name_ranks(ranks),
        count=len(group),
        module=next(iter(subjects.find(first.subject)), NOWHERE),
        source=index.source(first.source),
    )


def _name_ranks(ranks: Sequence[int]) -> str:
    """Format ranks with their noun."""
    named = format_ranks(compress_ranks(ranks))
    return named and f"{'rank' if len(ranks) == 1 else 'ranks'} {named}"


def make_gaps(recording: Recording) -> tuple[GapItem, ...]:
    """List gaps; those that differ only in rank share an item, which names the ranks."""
    items = []
    for gap, ranks in fold_problem_ranks(recording.gaps):
        named = format_ranks(compress_ranks(sorted(set(ranks))))
        has_many = len(set(ranks)) > 1
        items.append(
            GapItem(
                place=f"{gap.place} (ranks {named})" if has_many else gap.place,
                fact=gap.fact,
                rank=ranks[0] if ranks and not has_many else None,
                is_loss=gap.is_loss,
            )
        )
    return tuple(items)
