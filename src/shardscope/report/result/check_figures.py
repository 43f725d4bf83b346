"""Reads figures of a check before launch: the ranks that were run, and what was varied."""

from __future__ import annotations

from shardscope.record import Check, Recording, format_ranks
from shardscope.record.base import name_line
from shardscope.report.result.figures import RankCheckFigures, RoleFigures, VariationFigures
from shardscope.report.text.checked_ranks import sort_variations, summarize_check


def read_checks(recording: Recording) -> tuple[RankCheckFigures, ...]:
    """Read each check; variations under which ranks diverge come first."""
    return tuple(map(_read_check, recording.checks))


def _read_check(check: Check) -> RankCheckFigures:
    return RankCheckFigures(
        verdict=summarize_check(check),
        world_size=check.world_size,
        num_steps=check.num_steps,
        is_complete=check.is_complete,
        has_data=check.has_data,
        is_varied=check.is_varied,
        roles=tuple(
            RoleFigures(rank=role.rank, ranks=format_ranks(role.ranks)) for role in check.roles
        ),
        variations=tuple(
            VariationFigures(
                condition=variation.condition,
                outcome=str(variation.outcome),
                ranks=format_ranks(variation.ranks),
                line=name_line(variation.source),
                detail=variation.detail,
            )
            for variation in sort_variations(check)
        ),
    )
