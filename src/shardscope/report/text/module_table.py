"""The module tree as a table: collectives of each module by phase, and their bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from rich.console import RenderableType
from rich.text import Text

from shardscope.record import Phase
from shardscope.record.text import sanitize_text
from shardscope.record.units import UNKNOWN, format_bytes, format_count
from shardscope.report.model.module_tree import ModuleNode
from shardscope.report.model.traffic_totals import format_spread
from shardscope.report.text.elements import (
    Branch,
    Cell,
    Column,
    ColumnStyle,
    Grid,
    Row,
    make_text,
    narrower_layouts,
)

_MAX_ROWS = 60
_COLUMNS = {
    "module": Column("module", ColumnStyle.NAME, 22),
    "type": Column("type", ColumnStyle.NAME, 12),
    "what": Column("what", ColumnStyle.NAME, 42),
    Phase.FORWARD: Column("forward"),
    Phase.BACKWARD: Column("backward"),
    Phase.RECOMPUTE: Column("recomp."),
    Phase.OPTIMIZER: Column("optim."),
    Phase.OUTSIDE: Column("outside"),
    "count": Column("count"),
    "input": Column("input"),
    "sent": Column("sent"),
}

# A node, and the tree lines before its name.
TreeRow = tuple[ModuleNode, str]
# Bytes of a module other than traffic, by column name; None means not recorded.
ExtraColumns = Mapping[str, Callable[[ModuleNode], int | None]]


def render_tree(
    roots: tuple[ModuleNode, ...], *, is_complete: bool = False, metrics: ExtraColumns | None = None
) -> RenderableType:
    """Render a row per module with collectives; `is_complete` shows all modules and rows.

    `metrics` are additional columns; modules with a value there are shown, too.
    """
    metrics = {
        name: read for name, read in (metrics or {}).items() if any(read(root) for root in roots)
    }

    # If no module has any value, show all modules.
    is_bare = not metrics and not any(root.count().high for root in roots)

    def is_shown(node: ModuleNode) -> bool:
        has_value = node.count().high or any(metric(node) for metric in metrics.values())
        return is_complete or is_bare or bool(has_value)

    rows = [row for root in roots for row in _walk(root, "", "", is_shown)]
    num_hidden = 0
    if not is_complete:
        rows, num_hidden = _limit(rows)
    phases = [phase for phase in Phase if any(node.count(phase=phase).high for node, _ in rows)]
    note = f"… {num_hidden:,} more: --no-fold shows all" if num_hidden else ""
    columns = _COLUMNS | {name: Column(name) for name in metrics}
    cells = [_make_row(*row, metrics) for row in rows]
    layouts = _make_layouts(phases, list(metrics))
    return Grid(columns, cells, layouts, note=note)


def _walk(
    node: ModuleNode, own: str, below: str, is_shown: Callable[[ModuleNode], bool]
) -> Iterator[TreeRow]:
    yield node, own
    children = [child for child in node.children if is_shown(child)]
    for child in children:
        is_last = child is children[-1]
        guide, rest = ("└ ", "  ") if is_last else ("├ ", "│ ")
        yield from _walk(child, below + guide, below + rest, is_shown)


def _limit(rows: list[TreeRow]) -> tuple[list[TreeRow], int]:
    """Leave out the deepest modules, which are included in their parents' values."""
    for depth in sorted({len(guide) for _, guide in rows}, reverse=True):
        visible = [row for row in rows if len(row[1]) <= depth]
        if len(visible) <= _MAX_ROWS:
            return visible, len(rows) - len(visible)
    return rows[:_MAX_ROWS], len(rows) - _MAX_ROWS


def _make_layouts(phases: list[Phase], metrics: list[str]) -> list[list[str]]:
    """Return layouts: phases in separate columns or, if there is no room, counted together."""
    traffic = ["input", "sent"] if phases else []
    apart = ["module", "type", "what", *phases, *traffic, *metrics]
    together = ["module", "count", *traffic, *metrics]
    poorer = narrower_layouts(together, "input", "count", *metrics)
    untyped, typed = narrower_layouts(apart, "type")[1], narrower_layouts(apart, "what")[1]
    return [apart, untyped, *narrower_layouts(typed, "type", "input"), *poorer]


def _make_row(node: ModuleNode, guide: str, metrics: ExtraColumns) -> Row:
    cells: dict[str, Cell] = {
        phase: format_spread(node.count(phase=phase), format_count) for phase in Phase
    }
    cells |= {name: _format_metric(read(node)) for name, read in metrics.items()}
    return cells | {
        "module": Branch(guide, _format_label(node)),
        "type": make_text("|".join(node.types) if node.path else "", "dim"),
        "what": make_text(describe_kinds(node), "dim"),
        "count": format_spread(node.count(), format_count),
        "input": format_spread(node.input_bytes(), format_bytes),
        "sent": format_spread(node.wire_bytes(), format_bytes),
    }


def _format_metric(num_bytes: int | None) -> str:
    if num_bytes is None:
        return UNKNOWN
    return format_bytes(num_bytes) if num_bytes else "·"


def _format_label(node: ModuleNode) -> Text:
    """Format the name: `wq`, `0 … 31 ×32`, or the root's type."""
    if not node.path:
        return make_text("|".join(node.types) or "model", "bold")
    label = make_text(node.label)
    if node.repeat > 1:
        label.append(f" … {sanitize_text(node.last_label)}").append(f" ×{node.repeat}", "cyan")
    return label


def describe_kinds(node: ModuleNode) -> str:
    """Describe the collectives of the module itself, without children: `2× all_gather[dp]`."""
    counts: Counter[str] = Counter()
    for traffic in node.own:
        rank_counts: Counter[str] = Counter()
        for facet, totals in sorted(traffic.items(), key=lambda item: (item[0].kind, item[0].axis)):
            rank_counts[f"{facet.kind}[{facet.axis}]"] += totals.count
        counts |= rank_counts
    return ", ".join(f"{count}× {kind}" for kind, count in counts.items())
