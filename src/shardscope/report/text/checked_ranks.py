"""What `check` has tried: the ranks that were run, and what some of them were made to see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from shardscope.record import Check, CheckOutcome, Recording, Variation
from shardscope.record.units import plural
from shardscope.report.text.style import make_text, make_title
from shardscope.report.text.table import Column, ColumnStyle, Grid, Row, narrower_layouts

_STYLES = {CheckOutcome.DIVERGED: "bold red", CheckOutcome.NOT_TRIED: "dim"}
_WORDS = {
    CheckOutcome.SAME: "same collectives",
    CheckOutcome.DIVERGED: "ranks diverge",
    CheckOutcome.RAISED: "raises: the launcher ends all ranks",
    CheckOutcome.NOT_TRIED: "not tried",
}


def render_checks(recording: Recording) -> Iterator[RenderableType]:
    """Render what was tried; nothing if there was no check."""
    for check in recording.checks:
        yield make_title("Check", describe_ranks(check))
        yield Text(summarize_check(check))
        if check.variations:
            yield _render_variations(check.variations)


def describe_ranks(check: Check) -> str:
    """`2 of 2 ranks, with data, 5 steps to the end of the program`."""
    ranks = f"{len(check.roles):,} of {check.world_size:,} ranks"
    data = "with data" if check.has_data else "without data"
    end = "to the end of the program" if check.is_complete else "then ended"
    return f"{ranks} were run, {data}, {plural(check.num_steps, 'step')}, {end}"


def summarize_check(check: Check) -> str:
    """How many variations were tried, and what came of them."""
    counts = Counter(variation.outcome for variation in check.variations)
    if not check.variations:
        return "No decision of the program depends on what a rank alone sees."
    words = [f"{counts[outcome]:,} {_WORDS[outcome]}" for outcome in _WORDS if counts[outcome]]
    return f"{plural(len(check.variations), 'variation')}: {'; '.join(words)}."


def _render_variations(variations: tuple[Variation, ...]) -> RenderableType:
    columns = {
        "condition": Column("if", ColumnStyle.PROSE, 30),
        "outcome": Column("then", ColumnStyle.PROSE, 16),
    }
    rows: list[Row] = [
        {"condition": make_text(variation.condition), "outcome": _describe_outcome(variation)}
        for variation in variations
    ]
    return Grid(columns, rows, narrower_layouts(list(columns)))


def _describe_outcome(variation: Variation) -> Text:
    text = make_text(_WORDS[variation.outcome], _STYLES.get(variation.outcome, ""))
    if variation.detail and variation.outcome is CheckOutcome.RAISED:
        text = make_text(f"raises {variation.detail}")
    return text
