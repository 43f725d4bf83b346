"""What `check` has tried: the ranks that were run, and what some of them were made to see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

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
_COUNTED = {
    CheckOutcome.DIVERGED: "ranks diverge under {:,}",
    CheckOutcome.SAME: "issue the same collectives under {:,}",
    CheckOutcome.RAISED: "raise an exception under {:,}",
    CheckOutcome.NOT_TRIED: "{:,} not tried",
}
_ORDER = (
    CheckOutcome.DIVERGED,
    CheckOutcome.NOT_TRIED,
    CheckOutcome.RAISED,
    CheckOutcome.SAME,
)


def render_checks(recording: Recording) -> Iterator[RenderableType]:
    """Render what was tried; nothing if there was no check."""
    for check in recording.checks:
        yield make_title("Check", describe_ranks(check))
        yield Text(summarize_check(check))
        if check.variations:
            yield _render_variations(sort_variations(check))


def describe_ranks(check: Check) -> str:
    """`2 of 2 ranks, with data, 5 steps to the end of the program`."""
    ranks = f"{len(check.roles):,} of {check.world_size:,} ranks"
    data = "with data" if check.has_data else "without data"
    end = "to the end of the program" if check.is_complete else "then ended"
    return f"{ranks} were run, {data}, {plural(check.num_steps, 'step')}, {end}"


def summarize_check(check: Check) -> str:
    """How many variations were tried, and what came of them."""
    counts = Counter(variation.outcome for variation in check.variations)
    if not check.is_varied:
        return "What ranks see was not varied."
    if not check.variations:
        return "No decision of the program depends on what a rank alone sees."
    words = [text.format(counts[outcome]) for outcome, text in _COUNTED.items() if counts[outcome]]
    return f"{plural(len(check.variations), 'variation')}: {'; '.join(words)}."


def sort_variations(check: Check) -> list[Variation]:
    """Sort variations by what is worth reading first: those under which ranks diverge."""
    return sorted(check.variations, key=lambda variation: _ORDER.index(variation.outcome))


def _render_variations(variations: Sequence[Variation]) -> RenderableType:
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
    words, style = _WORDS[variation.outcome], _STYLES.get(variation.outcome, "")
    if variation.detail and variation.outcome is CheckOutcome.RAISED:
        words = f"raises: {variation.detail}"
    elif variation.detail:
        words = f"{words}: {variation.detail}"
    return make_text(words, style)
