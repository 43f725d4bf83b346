"""The sharded module tree, and every parameter with its placements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import final

from msgspec import Struct
from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from shardscope.record import Mark, MarkKind, Module, Parameter, Recording
from shardscope.record.layer_names import fold_layers, is_layer_number
from shardscope.record.units import UNKNOWN, format_bytes, plural
from shardscope.report.model.holdings import sum_holdings
from shardscope.report.model.module_tree import facts_of
from shardscope.report.text.heading import name_holder
from shardscope.report.text.style import make_text, make_title
from shardscope.report.text.table import Column, ColumnStyle, Grid, Row, narrower_layouts

FULLY_SHARDED = "FULLY SHARDED"
_SHARDED = {MarkKind.FULLY_SHARD, MarkKind.FSDP1}
_MAX_NAME_DEPTH = 64  # deeper names are not split, so that recursion is bounded


@final
class TreeLine:
    """A module, or `repeat` adjacent identical modules, of which `last` is the last one's name."""

    def __init__(self, module: Module, depth: int) -> None:
        self.module = module
        self.depth = depth
        self.repeat = 1
        self.last = module.name

    @property
    def label(self) -> str:
        """Return `u1.l1[Linear]`, or `layers.0-31[Block]` for folded layers."""
        name = self.module.name
        if self.repeat > 1:
            name = f"{name}-{self.last.rpartition('.')[2]}"
        return f"{name}[{self.module.type}]" if self.module.type else name

    @property
    def is_fully_sharded(self) -> bool:
        """Whether FSDP was applied to the module itself."""
        return any(mark.kind in _SHARDED for mark in self.module.marks)


def format_tree(modules: Sequence[Module], *, is_folded: bool = False) -> str:
    """Format the tree as text, as PyTorch documents it for a fully sharded model."""
    lines = (
        f"{'    ' * line.depth}{line.label}"
        + (f" {FULLY_SHARDED}" if line.is_fully_sharded else "")
        + (f" ×{line.repeat}" if line.repeat > 1 else "")
        for line in list_tree(modules, is_folded=is_folded)
    )
    return "".join(f"{line}\n" for line in lines)


def list_tree(modules: Sequence[Module], *, is_folded: bool = False) -> list[TreeLine]:
    """List the lines from the root; `is_folded` shows only the first of identical layers."""
    return list(_walk(_Node.build(modules), is_folded=is_folded))


@final
class _Node:
    def __init__(self) -> None:
        self.module: Module | None = None
        self.children: dict[str, _Node] = {}

    @classmethod
    def build(cls, modules: Iterable[Module]) -> _Node:
        root = cls()
        for module in modules:
            node = root
            for part in module.name.split(".", _MAX_NAME_DEPTH) if module.name else ():
                node = node.children.setdefault(part, cls())
            if node.module is None:  # ranks may differ: the first form is shown
                node.module = module
        return root

    def signature(self) -> object:
        """Return a key that is equal for modules that differ only in their name."""
        module = self.module
        own = None
        if module is not None:
            own = (module.type, module.marks, tuple(map(facts_of, module.parameters)))
        return own, tuple((name, child.signature()) for name, child in self.children.items())


def _walk(node: _Node, depth: int = 0, *, is_folded: bool) -> Iterator[TreeLine]:
    if node.module is not None:
        yield TreeLine(node.module, depth)
        depth += 1
    first: TreeLine | None = None
    signature: object = None
    for name, child in node.children.items():
        is_layer = is_folded and is_layer_number(name) and child.module is not None
        if is_layer and first is not None and child.signature() == signature:
            assert child.module is not None
            first.repeat += 1
            first.last = child.module.name
            continue
        lines = list(_walk(child, depth, is_folded=is_folded))
        first = lines[0] if is_layer and lines else None
        signature = child.signature() if is_layer else None
        yield from lines


_MAX_LINES = 80
_INDENT = 4
_MAX_INDENT_DEPTH = 8  # levels of indentation
_COLUMNS = {
    "name": Column("parameter", ColumnStyle.NAME, 28),
    "shape": Column("shape"),
    "dtype": Column("dtype", ColumnStyle.NAME, 8),
    "placements": Column("placements", ColumnStyle.NAME, 16),
    "group": Column("FSDP group", ColumnStyle.NAME, 10),
    "rule": Column("rule", ColumnStyle.NAME, 8),
    "tied": Column("tied to", ColumnStyle.NAME, 8),
    "global": Column("global"),
    "local": Column("local"),
}
_GROUPS = (MarkKind.FULLY_SHARD, MarkKind.FSDP1)
_WORDS = {
    MarkKind.DDP: "DDP",
    MarkKind.COMPILED: "compiled",
    MarkKind.CHECKPOINTED: "checkpointed",
}


class ParameterRow(Struct, frozen=True):
    """A parameter, or the same parameter of identical layers."""

    name: str
    count: int
    parameter: Parameter


def render_audit(recording: Recording, *, is_folded: bool = True) -> Iterator[RenderableType]:
    """Render the tree, then the table, each with a title."""
    yield make_title("Sharded modules", _describe_total(recording))
    lines = list_tree(recording.modules, is_folded=is_folded)
    shown = lines[:_MAX_LINES] if is_folded else lines
    yield from (_render_line(line) for line in shown)
    if len(shown) < len(lines):
        yield Text(f"… {len(lines) - len(shown):,} more: --no-fold shows all", "dim")
    rows = list(list_parameter_rows(recording, is_folded=is_folded))
    if rows:
        is_annotated = any(row.parameter.is_annotated for row in rows)
        more = ", I: invariant, V: varying" if is_annotated else ""
        legend = f"S: sharded, R: replicated{more}; local: on one rank"
        yield make_title("Parameters and buffers", legend)
        yield _render_parameters(rows, is_folded=is_folded)


def _describe_total(recording: Recording) -> str:
    holdings = sum_holdings(recording)
    if holdings is None:
        return "parameters were not recorded"
    count = plural(holdings.num_parameters, "parameter")
    if holdings.global_bytes is None or holdings.local_bytes is None:
        return f"{count}; sizes were not recorded"
    global_bytes, local_bytes = (
        format_bytes(holdings.global_bytes),
        format_bytes(holdings.local_bytes),
    )
    if not holdings.num_parameters:
        return count
    return f"{count}, {global_bytes} in all, {local_bytes} on {name_holder(recording.run)}"


def _render_line(line: TreeLine) -> RenderableType:
    text = make_text(line.label, width=120)
    if line.repeat > 1:
        text.append(f" ×{line.repeat}", "bold")
    if line.is_fully_sharded:
        text.append(f" {FULLY_SHARDED}", "bold green")
    # Short texts come first, long ones may wrap.
    for mark in sorted(line.module.marks, key=lambda mark: mark.kind in _GROUPS):
        text.append("  ").append_text(_render_mark(mark))
    if line.module.aliases:
        text.append("  ").append_text(make_text(f"also {', '.join(line.module.aliases)}", "dim"))
    return Padding(text, (0, 0, 0, _INDENT * min(line.depth, _MAX_INDENT_DEPTH)), expand=False)


def _render_mark(mark: Mark) -> Text:
    over = f" over {' × '.join(mark.axes)}" if mark.axes else ""
    if mark.kind in _GROUPS:
        name = "FSDP2" if mark.kind is MarkKind.FULLY_SHARD else "FSDP1"
        number = mark.num_parameters
        count = "" if number is None else plural(number, "parameter")
        words = [f"{name}{over}", count, mark.detail, *mark.options]
        return make_text(", ".join(filter(None, words)), "dim")
    if mark.kind is MarkKind.TENSOR_PARALLEL:
        return make_text(f"{mark.detail}{over}", "cyan")
    return make_text(_WORDS[mark.kind] + over, "magenta")


def list_parameter_rows(recording: Recording, *, is_folded: bool) -> Iterator[ParameterRow]:
    """List parameters and buffers; identical ones of repeated layers share a row."""
    rows: dict[object, list[tuple[str, Parameter]]] = {}
    for module in recording.modules:
        for parameter in module.parameters:
            name = f"{module.name}.{parameter.name}".lstrip(".")
            pattern = fold_layers(name) if is_folded else name
            facts = (
                parameter.shape,
                parameter.local_shape,
                parameter.dtype,
                parameter.placements,
                parameter.axes,
                parameter.rule,
            )
            key = (pattern, *facts) if is_folded else (pattern, *facts, module.ranks)
            rows.setdefault(key, []).append((name, parameter))
    for same in rows.values():
        name, parameter = same[0]
        yield ParameterRow(fold_layers(name) if len(same) > 1 else name, len(same), parameter)


def _render_parameters(rows: list[ParameterRow], *, is_folded: bool) -> RenderableType:
    shown = rows[:_MAX_LINES] if is_folded else rows
    note = (
        f"… {len(rows) - len(shown):,} more: --no-fold shows all" if len(shown) < len(rows) else ""
    )
    layouts = narrower_layouts(list(_COLUMNS), "rule", "dtype", "group", "tied", "shape")
    return Grid(_COLUMNS, [_make_row(row) for row in shown], layouts, note=note)


def _make_row(row: ParameterRow) -> Row:
    parameter = row.parameter
    name = make_text(row.name, "dim" if parameter.is_buffer else "")
    if row.count > 1:
        name.append(f" ×{row.count}", "bold")
    return {
        "name": name,
        "shape": _format_shapes(parameter),
        "dtype": make_text(parameter.dtype),
        "placements": make_text(_format_placements(parameter)),
        "group": _format_group(row),
        "rule": make_text(parameter.rule or ""),
        "tied": make_text(parameter.alias_group or ""),
        "global": UNKNOWN
        if parameter.global_bytes is None
        else format_bytes(parameter.global_bytes),
        "local": UNKNOWN if parameter.local_bytes is None else format_bytes(parameter.local_bytes),
    }


def _format_group(row: ParameterRow) -> Text:
    group = row.parameter.fsdp_group
    if group is None:
        return Text()
    return make_text((fold_layers(group) if row.count > 1 else group) or "(root)")


def _format_shapes(parameter: Parameter) -> str:
    shape, local_shape = (
        _format_shape(shape) for shape in (parameter.shape, parameter.local_shape)
    )
    return shape if shape == local_shape else f"{shape} → {local_shape}"


def _format_shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) if shape else "()"


def _format_placements(parameter: Parameter) -> str:
    if not parameter.placements:
        return (
            "buffer"
            if parameter.is_buffer
            else ("flat" if parameter.fsdp_group is not None else "plain")
        )
    placed = zip(parameter.axes, parameter.placements, strict=False)
    return " ".join(f"{axis}:{_abbreviate(placement)}" for axis, placement in placed)


_ABBREVIATIONS = {
    "Shard": "S",
    "Replicate": "R",
    "Partial": "P",
    "Invariant": "I",
    "Varying": "V",
}


def _abbreviate(placement: str) -> str:
    """Abbreviate a placement as torch does in errors: `S(0)`, `R`, `P(sum)`."""
    name, bracket, rest = placement.removeprefix("Strided").partition("(")
    return _ABBREVIATIONS.get(name, name) + bracket + rest
