"""What was found, the gravest first, and what was not understood."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from shardscope.record import Finding, Recording, compress_ranks, format_ranks
from shardscope.report.numbered import fold_numbers, name_all
from shardscope.report.page.index import NOWHERE, Index
from shardscope.report.page.records import FindingItem, GapItem
from shardscope.report.page.views.subjects import Subjects
from shardscope.report.problems import SEVERITIES, fold_problem_ranks

__all__ = ["make_findings", "make_gaps"]


def make_findings(
    recording: Recording, index: Index, subjects: Subjects
) -> tuple[FindingItem, ...]:
    """Those that are alike but for rank or layer are one."""
    groups: dict[Hashable, list[Finding]] = {}
    for one in recording.findings:
        groups.setdefault(_likeness(one), []).append(one)
    items = [_make_finding(group, index, subjects) for group in groups.values()]
    order = {str(severity): at for at, severity in enumerate(SEVERITIES)}
    return tuple(sorted(items, key=lambda item: order[item.severity]))


def _likeness(one: Finding) -> Hashable:
    texts = tuple(map(fold_numbers, (one.subject, one.fact, one.remedy)))
    return one.rule, one.severity, texts, one.source


def _make_finding(group: Sequence[Finding], index: Index, subjects: Subjects) -> FindingItem:
    first = group[0]
    ranks = sorted({one.rank for one in group if one.rank is not None})
    return FindingItem(
        rule=first.rule,
        severity=first.severity,
        subject=name_all([one.subject for one in group]),
        fact=name_all([one.fact for one in group]),
        remedy=name_all([one.remedy for one in group]),
        ranks=_name_ranks(ranks),
        count=len(group),
        module=next(iter(subjects.find(first.subject)), NOWHERE),
        source=index.source(first.source),
    )


def _name_ranks(ranks: Sequence[int]) -> str:
    """Where there is one rank, its number alone would be a riddle."""
    named = format_ranks(compress_ranks(ranks))
    return named and f"{'rank' if len(ranks) == 1 else 'ranks'} {named}"


def make_gaps(recording: Recording) -> tuple[GapItem, ...]:
    """Those that differ by rank alone are one, which names the ranks."""
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
