"""Collectives as tables: by kind, axis and phase; by cause; by module, as a tree; by rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, final

from msgspec import Struct
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from shardscope.record import (
    Collective,
    Phase,
    Recording,
    Redistribute,
    Source,
    count_ranks,
    describe_cause,
    format_ranks,
)
from shardscope.record.recording import name_axis
from shardscope.record.text import sanitize_text
from shardscope.record.traffic import (
    TrafficTotals,
    choose_busiest,
    count_traffic,
    sum_traffic,
)
from shardscope.record.units import UNKNOWN, format_bytes, format_count, plural
from shardscope.report.model.module_tree import ModuleNode, Traffic
from shardscope.report.model.traffic_totals import (
    Facet,
    IdenticalRanks,
    format_spread,
    spread,
)
from shardscope.report.text.heading import describe_passes
from shardscope.report.text.style import format_bar, format_share, format_source, make_text
from shardscope.report.text.table import (
    Branch,
    Cell,
    Column,
    ColumnStyle,
    Grid,
    Row,
    narrower_layouts,
)

_MAX_ROWS = 60
_PHASES = [str(phase) for phase in Phase]
_FIGURES = {
    "count": Column("count"),
    "input": Column("input"),
    "output": Column("output"),
    "sent": Column("sent"),
    "share": Column("share"),
    "bar": Column("", ColumnStyle.NAME, 8),
}
_MIN_WIDTHS = {"kind": 14, "axis": 8, "phase": 9}  # kinds and phases are never shortened

_TREE_COLUMNS = {
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
# The facets that identify a row, and its totals.
Sums = list[tuple[tuple[str, ...], TrafficTotals]]


def describe_totals(recording: Recording, rank_sets: tuple[IdenticalRanks, ...]) -> str:
    """Describe the scope of the totals: one rank if all are identical, else all ranks together."""
    # Each row may have a different busiest rank, and their values would not add up.
    num_ranks = sum(count_ranks(rank_set.ranks) for rank_set in rank_sets)
    whose = "per rank" if len(rank_sets) == 1 else f"{plural(num_ranks, 'rank')} together"
    return ", ".join(filter(None, [whose, describe_passes(recording)]))


def render_totals(
    totals: Traffic, rank_sets: tuple[IdenticalRanks, ...], facets: Sequence[str]
) -> RenderableType:
    """A row for each combination of the facets (`kind`, `axis`, `phase`) that occurs."""
    sums = _sum_by(totals, rank_sets, facets)
    shown = _keep_costliest(sums)
    total = sum_traffic(totals for _, totals in sums)
    rows = _make_rows(shown, total, facets)
    if len(sums) > 1:
        rows.append({facets[0]: "total", **_format_totals(total)})
    num_hidden = len(sums) - len(shown)
    note = f"… {num_hidden:,} more, which cost less: see shardscope export --to csv"
    columns = {
        name: Column(name, ColumnStyle.NAME, _MIN_WIDTHS[name]) for name in facets
    } | _FIGURES
    layouts = narrower_layouts(list(columns), "bar", "share", "output", "input", "count")
    return Grid(columns, rows, layouts, note=note if num_hidden else "")


def _sum_by(totals: Traffic, rank_sets: tuple[IdenticalRanks, ...], facets: Sequence[str]) -> Sums:
    sums: dict[tuple[str, ...], TrafficTotals] = defaultdict(TrafficTotals)
    for rank_set, traffic in zip(rank_sets, totals, strict=True):
        times = count_ranks(rank_set.ranks) if len(rank_sets) > 1 else 1
        for facet, total in traffic.items():
            sums[_read(facet, facets)] += total * times
    return sorted(sums.items(), key=lambda item: [_sort_key(name) for name in item[0]])


def _read(facet: Facet, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(getattr(facet, name)) for name in names)


def _sort_key(name: str) -> tuple[int, str]:
    # Phases in order of execution, other facets alphabetically.
    return (_PHASES.index(name), "") if name in _PHASES else (-1, name)


def _keep_costliest(sums: Sums) -> Sums:
    if len(sums) <= _MAX_ROWS:
        return sums
    least = sorted(totals.wire_bytes for _, totals in sums)[-_MAX_ROWS]
    return [item for item in sums if item[1].wire_bytes >= least][:_MAX_ROWS]


def _make_rows(sums: Sums, total: TrafficTotals, facets: Sequence[str]) -> list[Row]:
    rows: list[Row] = []
    previous: tuple[str, ...] = ()
    for names, totals in sums:
        row: dict[str, Cell] = {
            name: make_text(text)
            for index, (name, text) in enumerate(zip(facets, names, strict=True))
            if names[: index + 1] != previous[: index + 1]
        }
        row |= _format_totals(totals)
        row["share"] = format_share(totals.wire_bytes, total.wire_bytes)
        row["bar"] = format_bar(totals.wire_bytes, total.wire_bytes)
        rows.append(row)
        previous = names
    return rows


def _format_totals(totals: TrafficTotals) -> dict[str, Cell]:
    return {
        "count": format_count(totals.count),
        "input": format_bytes(totals.input_bytes),
        "output": format_bytes(totals.output_bytes),
        "sent": format_bytes(totals.wire_bytes),
    }


_MAX_LINES = 4  # lines of a cause
_INDENT = 2
_CAUSE_COLUMNS = {
    "what": Column("what", ColumnStyle.NAME, 14),
    "what and cause": Column("what and cause", ColumnStyle.PROSE, 20, covers=("what", "cause")),
    "count": Column("count"),
    "sent": Column("sent"),
    "cause": Column("cause", ColumnStyle.PROSE, 32),
}
# If there is no room for the cause beside the numbers, it goes below the collective.
_LAYOUTS = [
    ["what", "count", "sent", "cause"],
    ["what and cause", "count", "sent"],
    ["what and cause", "sent"],
]


class _Key(NamedTuple):
    words: str
    label: str


@final
class Reason:
    """A cause and its collectives, with totals for each set of identical ranks."""

    def __init__(self, words: str, label: str, num_rank_sets: int) -> None:
        self.words = words
        self.label = label
        self.totals = [TrafficTotals()] * num_rank_sets
        self.source: Source | None = None  # source line of the first collective
        self.is_implicit = False
        self.owners: dict[str | None, None] = {}  # in order of issue

    def add(self, call: Collective, index: int) -> None:
        """Add a call of the ranks in set `index`."""
        self.totals[index] += count_traffic(call)
        self.source = self.source or call.source
        self.is_implicit |= isinstance(call.cause, Redistribute) and call.cause.is_implicit
        self.owners[call.owner] = None

    @property
    def busiest(self) -> TrafficTotals:
        """Return the totals of the set of ranks that sent most."""
        return choose_busiest(self.totals)


def gather_reasons(recording: Recording, rank_sets: tuple[IdenticalRanks, ...]) -> list[Reason]:
    """Group collectives by cause, kind and axis, most bytes first."""
    reasons: dict[_Key, Reason] = {}
    for index, rank_set in enumerate(rank_sets):
        for call in rank_set.calls:
            axis = name_axis(call, recording.run.world_size)
            key = _Key(describe_cause(call.cause), f"{call.kind}[{axis}]")
            reason = reasons.get(key)
            if reason is None:
                reason = reasons[key] = Reason(*key, len(rank_sets))
            reason.add(call, index)
    return sorted(
        reasons.values(),
        key=lambda reason: (-reason.busiest.wire_bytes, reason.words, reason.label),
    )


def render_causes(
    recording: Recording, rank_sets: tuple[IdenticalRanks, ...], *, limit: int | None = None
) -> RenderableType:
    """Render a row for each cause and collective, most bytes first, at most `limit` rows."""
    ranked = gather_reasons(recording, rank_sets)
    rows = [_make_row(reason) for reason in ranked[:limit]]
    num_hidden = len(ranked) - len(rows)
    note = f"… {num_hidden:,} more: --by cause shows all" if num_hidden else ""
    return Grid(_CAUSE_COLUMNS, rows, _LAYOUTS, note=note)


def _make_row(reason: Reason) -> Row:
    return {
        "what": make_text(reason.label),
        "count": format_spread(spread(totals.count for totals in reason.totals), format_count),
        "sent": format_spread(spread(totals.wire_bytes for totals in reason.totals), format_bytes),
        "cause": lambda width: _format_reason(reason, width),
        "what and cause": lambda width: Group(
            make_text(reason.label, width=width),
            Padding(_format_reason(reason, width - _INDENT), (0, 0, 0, _INDENT)),
        ),
    }


def _format_reason(reason: Reason, width: int) -> Text:
    text = make_text(reason.words, width=_MAX_LINES * width)
    if reason.source is not None:
        text.append("\n").append_text(format_source(reason.source, width=width))
    return text


_MAX_SHOWN = 8
_RANK_COLUMNS = {
    "ranks": Column("ranks", ColumnStyle.NAME, 16),
    "count": Column("count"),
    "input": Column("input"),
    "output": Column("output"),
    "sent": Column("sent"),
}


def render_ranks(rank_sets: tuple[IdenticalRanks, ...]) -> RenderableType:
    """Render a row for each set of identical ranks, busiest first."""
    sums = [
        (rank_set, sum_traffic(count_traffic(call) for call in rank_set.calls))
        for rank_set in rank_sets
    ]
    sums.sort(key=lambda item: (-item[1].wire_bytes, item[0].ranks[0].first))
    rows: list[Row] = [
        {
            "ranks": make_text(format_ranks(rank_set.ranks)),
            "count": format_count(total.count),
            "input": format_bytes(total.input_bytes),
            "output": format_bytes(total.output_bytes),
            "sent": format_bytes(total.wire_bytes),
        }
        for rank_set, total in sums[:_MAX_SHOWN]
    ]
    num_hidden = len(sums) - _MAX_SHOWN
    layouts = narrower_layouts(list(_RANK_COLUMNS), "output", "input", "count")
    return Grid(
        _RANK_COLUMNS, rows, layouts, note=f"… {num_hidden:,} more" if num_hidden > 0 else ""
    )


_NUM_SHOWN = 10
_MODULE_COLUMNS = {
    "module": Column("module", ColumnStyle.NAME, 30),
    "count": Column("count"),
    "each": Column("each"),
    "sent": Column("sent"),
    "share": Column("share"),
    "bar": Column("", ColumnStyle.NAME, 8),
}


class Cost(Struct, frozen=True):
    """Collectives of a module itself, or of each of several identical modules."""

    name: str
    repeat: int
    own: TrafficTotals

    @property
    def wire_bytes(self) -> int:
        return self.own.wire_bytes * self.repeat


def render_costliest(roots: tuple[ModuleNode, ...]) -> RenderableType:
    """Render the ten modules that sent most themselves; folded layers count together."""
    costs = list_costs(roots)
    total_bytes = sum(cost.wire_bytes for cost in costs)
    rows: list[Row] = [
        {
            "module": make_text(cost.name),
            "count": format_count(cost.own.count * cost.repeat),
            "each": format_bytes(cost.own.wire_bytes),
            "sent": format_bytes(cost.wire_bytes),
            "share": format_share(cost.wire_bytes, total_bytes),
            "bar": format_bar(cost.wire_bytes, total_bytes),
        }
        for cost in costs[:_NUM_SHOWN]
    ]
    return Grid(
        _MODULE_COLUMNS,
        rows,
        narrower_layouts(list(_MODULE_COLUMNS), "bar", "share", "each", "count"),
    )


def list_costs(roots: tuple[ModuleNode, ...]) -> list[Cost]:
    """List modules that issued collectives themselves, most bytes first."""
    costs = [cost for root in roots for cost in _walk(root, "", 1) if cost.own.count]
    return sorted(costs, key=lambda cost: -cost.wire_bytes)


def _walk(node: ModuleNode, prefix: str, repeat: int) -> Iterator[Cost]:
    repeat *= node.repeat
    name = prefix + (f"{{{node.label}…{node.last_label}}}" if node.repeat > 1 else node.label)
    yield Cost(name or "|".join(node.types) or "model", repeat, node.own_totals())
    for child in node.children:
        yield from _walk(child, f"{name}." if name else "", repeat)


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

    rows = [row for root in roots for row in _walk_tree(root, "", "", is_shown)]
    num_hidden = 0
    if not is_complete:
        rows, num_hidden = _limit_tree(rows)
    phases = [phase for phase in Phase if any(node.count(phase=phase).high for node, _ in rows)]
    note = f"… {num_hidden:,} more: --no-fold shows all" if num_hidden else ""
    columns = _TREE_COLUMNS | {name: Column(name) for name in metrics}
    cells = [_make_tree_row(*row, metrics) for row in rows]
    layouts = _make_tree_layouts(phases, list(metrics))
    return Grid(columns, cells, layouts, note=note)


def _walk_tree(
    node: ModuleNode, own: str, below: str, is_shown: Callable[[ModuleNode], bool]
) -> Iterator[TreeRow]:
    yield node, own
    children = [child for child in node.children if is_shown(child)]
    for child in children:
        is_last = child is children[-1]
        guide, rest = ("└ ", "  ") if is_last else ("├ ", "│ ")
        yield from _walk_tree(child, below + guide, below + rest, is_shown)


def _limit_tree(rows: list[TreeRow]) -> tuple[list[TreeRow], int]:
    """Leave out the deepest modules, which are included in their parents' values."""
    for depth in sorted({len(guide) for _, guide in rows}, reverse=True):
        visible = [row for row in rows if len(row[1]) <= depth]
        if len(visible) <= _MAX_ROWS:
            return visible, len(rows) - len(visible)
    return rows[:_MAX_ROWS], len(rows) - _MAX_ROWS


def _make_tree_layouts(phases: list[Phase], metrics: list[str]) -> list[list[str]]:
    """Return layouts: phases in separate columns or, if there is no room, counted together."""
    traffic = ["input", "sent"] if phases else []
    apart = ["module", "type", "what", *phases, *traffic, *metrics]
    together = ["module", "count", *traffic, *metrics]
    poorer = narrower_layouts(together, "input", "count", *metrics)
    untyped, typed = narrower_layouts(apart, "type")[1], narrower_layouts(apart, "what")[1]
    return [apart, untyped, *narrower_layouts(typed, "type", "input"), *poorer]


def _make_tree_row(node: ModuleNode, guide: str, metrics: ExtraColumns) -> Row:
    cells: dict[str, Cell] = {
        phase: format_spread(node.count(phase=phase), format_count) for phase in Phase
    }
    cells |= {name: _format_metric(read(node)) for name, read in metrics.items()}
    return cells | {
        "module": Branch(guide, _format_module(node)),
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


def _format_module(node: ModuleNode) -> Text:
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
