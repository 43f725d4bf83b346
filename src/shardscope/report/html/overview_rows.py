"""Data of the overview: the run, the verdict, key metrics, findings and gaps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardscope.record import Finding, Recording, compress_ranks, format_ranks
from shardscope.record.finding_rules import FINDING_RULES, documentation_page
from shardscope.record.layer_names import join_layers_in_texts
from shardscope.record.traffic import choose_busiest, count_traffic, sum_traffic
from shardscope.record.units import format_bytes, plural
from shardscope.report.html.module_rows import FindingTargets
from shardscope.report.html.page import Fact, FindingItem, GapItem, RunFacts
from shardscope.report.html.page_index import NOWHERE, Index
from shardscope.report.html.page_overview import (
    CheckItem,
    CommandItem,
    ConcernItem,
    EmptyView,
    Term,
    VerdictItem,
)
from shardscope.report.model.finding_groups import SEVERITIES, group_findings
from shardscope.report.model.terms import TERMS
from shardscope.report.model.traffic_totals import IdenticalRanks
from shardscope.report.text.heading import describe_reality, describe_scope, name_mesh, name_ranks
from shardscope.report.text.judgements import Concern
from shardscope.report.text.key_metrics import list_key_metrics
from shardscope.report.text.next_commands import (
    VIEW_INSTRUMENTS,
    make_record_command,
    quote_files,
    suggest_commands,
)
from shardscope.report.text.problems import (
    describe_checks,
    describe_no_gaps,
    fold_problem_ranks,
)
from shardscope.report.text.style import format_share
from shardscope.report.text.verdict import RunVerdict, label_concern, list_checks

_MAX_TITLE = 120


def make_run(recording: Recording, files: Sequence[str] = ()) -> RunFacts:
    """Describe the run, recorded in `files`."""
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
        file=", ".join(files),
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
        Fact(
            label=card.label,
            value=card.value,
            note=card.note,
            view=metric.view,
            measure=card.measure,
        )
        for metric in list_key_metrics(recording, rank_sets)
        for card in metric.cards
    )


def make_findings(
    recording: Recording,
    rank_sets: tuple[IdenticalRanks, ...],
    index: Index,
    subjects: FindingTargets,
) -> tuple[FindingItem, ...]:
    """List findings; those that differ only in rank or layer share an item."""
    sums = (sum_traffic(map(count_traffic, rank_set.calls)) for rank_set in rank_sets)
    num_bytes = choose_busiest(sums).wire_bytes
    items = [
        _make_finding(group, index, subjects, num_bytes)
        for group in group_findings(recording.findings)
    ]
    order = {str(severity): at for at, severity in enumerate(SEVERITIES)}
    return tuple(sorted(items, key=lambda item: (order[item.severity], -(item.cost_bytes or 0))))


def _make_finding(
    group: Sequence[Finding], index: Index, subjects: FindingTargets, num_bytes: int
) -> FindingItem:
    first = group[0]
    known = FINDING_RULES.get(first.rule)
    cost, cost_bytes = _describe_cost(group, num_bytes)
    ranks = sorted({finding.rank for finding in group if finding.rank is not None})
    modules = [module for finding in group for module in subjects.find(finding.subject)]
    return FindingItem(
        rule=first.rule,
        severity=first.severity,
        subject=join_layers_in_texts([finding.subject for finding in group]),
        fact=join_layers_in_texts([finding.fact for finding in group]),
        remedy=join_layers_in_texts([finding.remedy for finding in group]),
        explanation=known.explanation if known else "",
        documentation=documentation_page(first.rule) if known else "",
        cost=cost,
        cost_bytes=cost_bytes,
        ranks=_name_ranks(ranks),
        count=len(group),
        module=next(iter(modules), NOWHERE),
        modules=tuple(dict.fromkeys(modules)),
        source=index.source(first.source),
    )


def _describe_cost(group: Sequence[Finding], num_bytes: int) -> tuple[str, int | None]:
    """Describe what findings cost a rank, of `num_bytes` that it sends; None is not known.

    Findings of several ranks cost each of them, those of several layers cost one rank together.
    """
    sums: dict[tuple[int | None, str], int] = {}
    for finding in group:
        for field in ("sent_bytes", "memory_bytes", "num_collectives"):
            value = getattr(finding, field)
            if value is not None:
                key = (finding.rank, field)
                sums[key] = sums.get(key, 0) + value
    sent, memory, count = (
        max((value for (_, name), value in sums.items() if name == field), default=None)
        for field in ("sent_bytes", "memory_bytes", "num_collectives")
    )
    if sent is not None:
        words = f"{format_bytes(sent)} sent"
        if num_bytes:
            words += f", {format_share(sent, num_bytes)} of all"
        return (f"{words}, in {plural(count, 'collective')}" if count else words), sent
    if memory is not None:
        return f"{format_bytes(memory)} of memory", memory
    return "", None


def _name_ranks(ranks: Sequence[int]) -> str:
    """Format ranks with their noun."""
    named = format_ranks(compress_ranks(ranks))
    return named and f"{'rank' if len(ranks) == 1 else 'ranks'} {named}"


def make_gaps(recording: Recording) -> tuple[GapItem, ...]:
    """List gaps; those that differ only in rank share an item, which names the ranks."""
    return tuple(
        GapItem(
            place=gap.place,
            fact=gap.fact,
            ranks=_name_ranks(sorted(set(ranks))),
            is_loss=gap.is_loss,
        )
        for gap, ranks in fold_problem_ranks(recording.gaps)
    )


def make_verdict(
    recording: Recording,
    verdict: RunVerdict,
    index: Index,
    subjects: FindingTargets,
    *,
    files: Sequence[str] = (),
    against: str = "",
) -> VerdictItem:
    """Make the verdict; the names of files, for commands, are empty if they are not known."""
    return VerdictItem(
        sentence=verdict.sentence,
        unchecked=verdict.unchecked_words,
        concerns=tuple(_make_concern(concern, index, subjects) for concern in verdict.concerns),
        checks=tuple(
            CheckItem(
                instrument=check.instrument,
                question=check.question,
                has_run=check.has_run,
                command=make_record_command(check.instrument, recording),
            )
            for check in list_checks(recording)
            if not check.is_needless or check.has_run
        ),
        commands=tuple(
            CommandItem(command=item.command, purpose=item.purpose)
            for item in suggest_commands(verdict, recording, files, against)
        ),
    )


def _make_concern(concern: Concern, index: Index, subjects: FindingTargets) -> ConcernItem:
    modules = () if concern.module is None else subjects.find(concern.module)
    return ConcernItem(
        judgement=concern.judgement,
        label=label_concern(concern),
        rule=concern.rule,
        fact=concern.fact,
        reason=concern.reason,
        view=concern.view,
        path=concern.module or "",
        module=next(iter(modules), NOWHERE),
        source=index.source(concern.source),
        remedy=concern.remedy,
    )


def make_empty_views(recording: Recording, files: Sequence[str] = ()) -> tuple[EmptyView, ...]:
    """List the command that would record the data of each view."""
    commands = {
        view: make_record_command(instrument, recording)
        for view, instrument in VIEW_INSTRUMENTS.items()
    }
    commands["compare"] = f"shardscope report {quote_files(files)} --against BEFORE.json.gz"
    return tuple(EmptyView(view=view, command=command) for view, command in commands.items())


def make_terms() -> tuple[Term, ...]:
    """List the words that the page explains, each with its meaning."""
    return tuple(
        Term(word=word, meaning=meaning)
        for words, meaning in TERMS.items()
        for word in words.split(", ")
    )
