"""The module tree as a table: who spoke in which phase, and how much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from shardscope.record import Phase
from shardscope.report.fold import ModuleNode
from shardscope.report.layout import ByWidth, make_table, make_text
from shardscope.report.names import make_inert
from shardscope.report.units import format_bytes, format_count, format_spread

__all__ = ["render_tree"]

_MAX_ROWS = 60
_WIDE = 110
_HEADERS = {
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.RECOMPUTE: "recomp.",
    Phase.OPTIMIZER: "optim.",
    Phase.OUTSIDE: "outside",
}

# A node, and the lines that lead to it.
Row = tuple[ModuleNode, str]


def render_tree(roots: tuple[ModuleNode, ...], *, is_complete: bool = False) -> RenderableType:
    """One row per module that spoke; `is_complete` keeps silent modules and every row."""
    rows = [row for root in roots for row in _walk(root, "", "", is_complete=is_complete)]
    num_hidden = 0
    if not is_complete:
        rows, num_hidden = _limit(rows)
    phases = [phase for phase in Phase if any(node.count(phase=phase).high for node, _ in rows)]
    return ByWidth(lambda width: _make_table(rows, phases, width, num_hidden))


def _walk(node: ModuleNode, own: str, below: str, *, is_complete: bool) -> Iterator[Row]:
    yield node, own
    children = [child for child in node.children if is_complete or child.count().high]
    for child in children:
        is_last = child is children[-1]
        guide, rest = ("└ ", "  ") if is_last else ("├ ", "│ ")
        yield from _walk(child, below + guide, below + rest, is_complete=is_complete)


def _limit(rows: list[Row]) -> tuple[list[Row], int]:
    """Leave out the deepest modules, whose figures are in their parents' too."""
    for depth in sorted({len(guide) for _, guide in rows}, reverse=True):
        kept = [row for row in rows if len(row[1]) <= depth]
        if len(kept) <= _MAX_ROWS:
            return kept, len(rows) - len(kept)
    return rows[:_MAX_ROWS], len(rows) - _MAX_ROWS


def _make_table(
    rows: list[Row], phases: list[Phase], width: int, num_hidden: int
) -> RenderableType:
    is_wide = width >= _WIDE
    headers = ["module", *(["what"] if is_wide else [])]
    cells = [_make_row(row, phases, is_wide=is_wide) for row in rows]
    if num_hidden:
        cells.append([Text(f"… {num_hidden:,} more: --no-fold shows all", "dim")])
    numbers = [*(_HEADERS[phase] for phase in phases), "put in", "on wire"]
    return make_table([*headers, *numbers], cells, num_names=len(headers))


def _make_row(row: Row, phases: list[Phase], *, is_wide: bool) -> list[Text | str]:
    node, guide = row
    return [
        Text(guide, "dim").append_text(_format_label(node, has_type=is_wide)),
        *([_describe_kinds(node)] if is_wide else []),
        *(format_spread(node.count(phase=phase), format_count) for phase in phases),
        format_spread(node.input_bytes(), format_bytes),
        format_spread(node.wire_bytes(), format_bytes),
    ]


def _format_label(node: ModuleNode, *, has_type: bool = False) -> Text:
    """`wq`, `0 … 31 ×32 Block`, or the root's type."""
    types = "|".join(node.types)
    if not node.path:
        return make_text(types or "model", "bold", width=60)
    label = make_text(node.label, width=80)
    if node.repeat > 1:
        label.append(f" … {make_inert(node.last_label)}").append(f" ×{node.repeat}", "cyan")
    if has_type and types:
        label.append(" ").append_text(make_text(types, "dim", width=40))
    return label


def _describe_kinds(node: ModuleNode) -> Text:
    """What the module itself said, its children apart: `2× all_gather[dp]`."""
    counts: Counter[str] = Counter()
    for traffic in node.own:
        mine: Counter[str] = Counter()
        for facet, one in sorted(traffic.items(), key=lambda item: (item[0].kind, item[0].axis)):
            mine[f"{facet.kind}[{facet.axis}]"] += one.count
        counts |= mine
    return make_text(", ".join(f"{count}× {what}" for what, count in counts.items()), "dim")
