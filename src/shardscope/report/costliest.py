"""The modules that cost most."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from rich.console import RenderableType

from shardscope.report.fold import ModuleNode
from shardscope.report.grid import Column, Grid, Look, Row, leave_out
from shardscope.report.layout import format_bar, format_share, make_text
from shardscope.report.traffic import Tally
from shardscope.report.units import format_bytes, format_count

__all__ = ["Cost", "list_costs", "render_costliest"]

_NUM_SHOWN = 10
_COLUMNS = {
    "module": Column("module", Look.NAME, 30),
    "count": Column("count"),
    "each": Column("each"),
    "sent": Column("sent"),
    "share": Column("share"),
    "bar": Column("", Look.NAME, 8),
}


class Cost(Struct, frozen=True):
    """What a module, or each of several that are alike, said itself."""

    name: str
    repeat: int
    own: Tally

    @property
    def wire_bytes(self) -> int:
        return self.own.wire_bytes * self.repeat


def render_costliest(roots: tuple[ModuleNode, ...]) -> RenderableType:
    """The ten that sent most themselves; modules of folded layers count together."""
    costs = list_costs(roots)
    whole = sum(cost.wire_bytes for cost in costs)
    rows: list[Row] = [
        {
            "module": make_text(cost.name),
            "count": format_count(cost.own.count * cost.repeat),
            "each": format_bytes(cost.own.wire_bytes),
            "sent": format_bytes(cost.wire_bytes),
            "share": format_share(cost.wire_bytes, whole),
            "bar": format_bar(cost.wire_bytes, whole),
        }
        for cost in costs[:_NUM_SHOWN]
    ]
    return Grid(_COLUMNS, rows, leave_out(list(_COLUMNS), "bar", "share", "each", "count"))


def list_costs(roots: tuple[ModuleNode, ...]) -> list[Cost]:
    """What every module that spoke said itself, the costliest first."""
    costs = [cost for root in roots for cost in _walk(root, "", 1) if cost.own.count]
    return sorted(costs, key=lambda cost: -cost.wire_bytes)


def _walk(node: ModuleNode, prefix: str, repeat: int) -> Iterator[Cost]:
    repeat *= node.repeat
    name = prefix + (f"{{{node.label}…{node.last_label}}}" if node.repeat > 1 else node.label)
    yield Cost(name or "|".join(node.types) or "model", repeat, node.own_tally())
    for child in node.children:
        yield from _walk(child, f"{name}." if name else "", repeat)
