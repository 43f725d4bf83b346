"""The module tree as a table: collectives of each module in each phase, and their bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from rich.console import RenderableType
from rich.text import Text

from shardscope.record import Phase
from shardscope.report.fold import ModuleNode
from shardscope.report.grid import Branch, Cell, Column, Grid, Look, Row, leave_out
from shardscope.report.layout import make_text
from shardscope.report.names import make_inert
from shardscope.report.units import UNKNOWN, format_bytes, format_count, format_spread

__all__ = ["describe_kinds", "render_tree"]

_MAX_ROWS = 60
_COLUMNS = {
    "module": Column("module", Look.NAME, 22),
    "type": Column("type", Look.NAME, 12),
    "what": Column("what", Look.NAME, 42),
    Phase.FORWARD: Column("forward"),
    Phase.BACKWARD: Column("backward"),
    Phase.RECOMPUTE: Column("recomp."),
    Phase.OPTIMIZER: Column("optim."),
    Phase.OUTSIDE: Column("outside"),
    "count": Column("count"),
    "input": Column("input"),
    "sent": Column("sent"),
}

# A node, and the lines that lead to it.
Place = tuple[ModuleNode, str]
# Bytes of a module that are not traffic, by the name of their column; None is not recorded.
Figures = Mapping[str, Callable[[ModuleNode], int | None]]


def render_tree(
    roots: tuple[ModuleNode, ...], *, is_complete: bool = False, figures: Figures | None = None
) -> RenderableType:
    """One row per module that spoke; `is_complete` keeps silent modules and every row.

    `figures` have columns of their own, and a module that has one is not silent.
    """
    figures = {
        name: read for name, read in (figures or {}).items() if any(read(root) for root in roots)
    }

    # Where nobody has anything to say, the tree itself is what there is to show.
    is_bare = not figures and not any(root.count().high for root in roots)

    def is_shown(node: ModuleNode) -> bool:
        has_figure = node.count().high or any(one(node) for one in figures.values())
        return is_complete or is_bare or bool(has_figure)

    rows = [row for root in roots for row in _walk(root, "", "", is_shown)]
    num_hidden = 0
    if not is_complete:
        rows, num_hidden = _limit(rows)
    phases = [phase for phase in Phase if any(node.count(phase=phase).high for node, _ in rows)]
    note = f"… {num_hidden:,} more: --no-fold shows all" if num_hidden else ""
    columns = _COLUMNS | {name: Column(name) for name in figures}
    cells = [_make_row(*row, figures) for row in rows]
    layouts = _make_layouts(phases, list(figures))
    return Grid(columns, cells, layouts, note=note)


def _walk(
    node: ModuleNode, own: str, below: str, is_shown: Callable[[ModuleNode], bool]
) -> Iterator[Place]:
    yield node, own
    children = [child for child in node.children if is_shown(child)]
    for child in children:
        is_last = child is children[-1]
        guide, rest = ("└ ", "  ") if is_last else ("├ ", "│ ")
        yield from _walk(child, below + guide, below + rest, is_shown)


def _limit(rows: list[Place]) -> tuple[list[Place], int]:
    """Leave out the deepest modules, whose figures are in their parents' too."""
    for depth in sorted({len(guide) for _, guide in rows}, reverse=True):
        kept = [row for row in rows if len(row[1]) <= depth]
        if len(kept) <= _MAX_ROWS:
            return kept, len(rows) - len(kept)
    return rows[:_MAX_ROWS], len(rows) - _MAX_ROWS


def _make_layouts(phases: list[Phase], figures: list[str]) -> list[list[str]]:
    """Phases stand side by side or, where there is no room for all, are counted together."""
    traffic = ["input", "sent"] if phases else []
    apart = ["module", "type", "what", *phases, *traffic, *figures]
    together = ["module", "count", *traffic, *figures]
    poorer = leave_out(together, "input", "count", *figures)
    untyped, typed = leave_out(apart, "type")[1], leave_out(apart, "what")[1]
    return [apart, untyped, *leave_out(typed, "type", "input"), *poorer]


def _make_row(node: ModuleNode, guide: str, figures: Figures) -> Row:
    cells: dict[str, Cell] = {
        phase: format_spread(node.count(phase=phase), format_count) for phase in Phase
    }
    cells |= {name: _format_figure(read(node)) for name, read in figures.items()}
    return cells | {
        "module": Branch(guide, _format_label(node)),
        "type": make_text("|".join(node.types) if node.path else "", "dim"),
        "what": make_text(describe_kinds(node), "dim"),
        "count": format_spread(node.count(), format_count),
        "input": format_spread(node.input_bytes(), format_bytes),
        "sent": format_spread(node.wire_bytes(), format_bytes),
    }


def _format_figure(num_bytes: int | None) -> str:
    if num_bytes is None:
        return UNKNOWN
    return format_bytes(num_bytes) if num_bytes else "·"


def _format_label(node: ModuleNode) -> Text:
    """`wq`, `0 … 31 ×32`, or the root's type."""
    if not node.path:
        return make_text("|".join(node.types) or "model", "bold")
    label = make_text(node.label)
    if node.repeat > 1:
        label.append(f" … {make_inert(node.last_label)}").append(f" ×{node.repeat}", "cyan")
    return label


def describe_kinds(node: ModuleNode) -> str:
    """What the module itself said, its children apart: `2× all_gather[dp]`."""
    counts: Counter[str] = Counter()
    for traffic in node.own:
        mine: Counter[str] = Counter()
        for facet, one in sorted(traffic.items(), key=lambda item: (item[0].kind, item[0].axis)):
            mine[f"{facet.kind}[{facet.axis}]"] += one.count
        counts |= mine
    return ", ".join(f"{count}× {what}" for what, count in counts.items())
