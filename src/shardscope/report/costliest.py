"""The modules that cost most."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from rich.console import RenderableType

from shardscope.report.fold import ModuleNode
from shardscope.report.layout import format_bar, make_table, make_text
from shardscope.report.traffic import Tally
from shardscope.report.units import format_bytes, format_count

__all__ = ["render_costliest"]

_NUM_SHOWN = 10


class _Cost(Struct, frozen=True):
    """What a module, or each of several that are alike, said itself."""

    name: str
    repeat: int
    own: Tally

    @property
    def wire_bytes(self) -> int:
        return self.own.wire_bytes * self.repeat


def render_costliest(roots: tuple[ModuleNode, ...]) -> RenderableType:
    """The ten that sent most themselves; modules of folded layers count together."""
    costs = [cost for root in roots for cost in _walk(root, "", 1) if cost.own.count]
    costs.sort(key=lambda cost: -cost.wire_bytes)
    whole = sum(cost.wire_bytes for cost in costs)
    rows = [
        (
            make_text(cost.name, width=80),
            format_count(cost.own.count * cost.repeat),
            format_bytes(cost.own.wire_bytes),
            format_bytes(cost.wire_bytes),
            format_bar(cost.wire_bytes, whole),
        )
        for cost in costs[:_NUM_SHOWN]
    ]
    return make_table(("module", "count", "each", "on wire", "share"), rows)


def _walk(node: ModuleNode, prefix: str, repeat: int) -> Iterator[_Cost]:
    repeat *= node.repeat
    name = prefix + (f"{{{node.label}…{node.last_label}}}" if node.repeat > 1 else node.label)
    yield _Cost(name or "|".join(node.types) or "model", repeat, node.own_tally())
    for child in node.children:
        yield from _walk(child, f"{name}." if name else "", repeat)
