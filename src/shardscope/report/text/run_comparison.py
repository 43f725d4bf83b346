"""The comparison of two runs by the values that they sampled."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from shardscope.record import Recording, RunComparison, RunDeviation, ValueKind
from shardscope.record.units import describe_all, plural
from shardscope.report.runs.tensor_comparison import NOUNS
from shardscope.report.text.style import make_text, make_title
from shardscope.report.text.table import Column, ColumnStyle, Grid, Row, narrower_layouts

_MAX_ROWS = 12
_COLUMNS = {
    "tensor": Column("tensor", ColumnStyle.NAME, 24),
    "kind": Column("", ColumnStyle.NAME, 12),
    "a": Column("A"),
    "b": Column("B"),
    "deviation": Column("deviation"),
    "limit": Column("noise"),
}


def render_comparisons(recording: Recording) -> Iterator[RenderableType]:
    """Render each comparison of two runs; nothing if there are none."""
    for comparison in recording.comparisons:
        yield make_title("Runs", "norms of full tensors; deviations relative to the norm")
        yield make_text(f"A: {comparison.run_a}, {plural(comparison.world_size_a, 'rank')}")
        yield make_text(f"B: {comparison.run_b}, {plural(comparison.world_size_b, 'rank')}")
        yield make_text(summarize_comparison(comparison), "bold")
        for sentence in comparison.agreed:
            yield make_text(f"agrees in {sentence}")
        if comparison.deviations:
            yield Text("")
            yield _render_deviations(comparison)


def summarize_comparison(comparison: RunComparison) -> str:
    """What a comparison found, in a sentence."""
    count = plural(comparison.num_compared, "tensor")
    steps = f"in {plural(len(comparison.steps), 'step')}"
    if comparison.deviations:
        first = comparison.deviations[0]
        where = first.suspect or first.name or "the model"
        return (
            f"{comparison.num_deviating:,} of {count} deviate {steps}, first in step {first.step}: "
            f"{where}, {NOUNS[first.kind]}."
        )
    if comparison.incomparable:
        return f"{count} agree {steps}; the rest cannot be compared: {comparison.incomparable}."
    if comparison.num_equal == comparison.num_compared:
        return f"All {count} are equal bit for bit on each rank {steps}."
    equal = f", {comparison.num_equal:,} of them bit for bit" if comparison.num_equal else ""
    return (
        f"{describe_all(comparison.num_compared, 'tensor', 'agree')} within noise {steps}{equal}."
    )


def _render_deviations(comparison: RunComparison) -> RenderableType:
    shown = comparison.deviations[:_MAX_ROWS]
    num_hidden = comparison.num_deviating - len(shown)
    return Grid(
        _COLUMNS,
        [_make_row(deviation) for deviation in shown],
        narrower_layouts(list(_COLUMNS), "limit", "deviation"),
        note=f"… {num_hidden:,} more in this step" if num_hidden else "",
    )


def _make_row(deviation: RunDeviation) -> Row:
    name = deviation.name or "(model)"
    path = f"[{deviation.path}]" if deviation.path else ""
    figures = deviation.norm_a, deviation.norm_b
    if None in figures or deviation.kind is ValueKind.SETTING:
        figures = deviation.sum_a, deviation.sum_b
    return {
        "tensor": make_text(f"{name}{path}"),
        "kind": make_text(NOUNS[deviation.kind]),
        "a": _format(figures[0]),
        "b": _format(figures[1]),
        "deviation": "ranks disagree" if deviation.ranks else _format(deviation.deviation, ".1e"),
        "limit": _format(deviation.limit, ".1e"),
    }


def _format(value: float | None, form: str = ".5g") -> str:
    return "–" if value is None else format(value, form)
