"""Inferred SPMD types: a row for each tensor, `forward / gradient` along each mesh axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from shardscope.record import (
    UNDECIDED,
    InferredTypes,
    Recording,
    TensorRole,
    TensorTypes,
)
from shardscope.record.units import plural
from shardscope.report.text.style import make_text, make_title
from shardscope.report.text.table import Cell, Column, ColumnStyle, Grid, Row, narrower_layouts

_STYLES = {"V": "yellow", UNDECIDED: "dim"}


def render_types(recording: Recording, *, is_folded: bool = True) -> Iterator[RenderableType]:
    """Render the types of each mesh; nothing if none were inferred."""
    for types in recording.types:
        mesh = " × ".join(f"{axis.name}={axis.size:,}" for axis in types.axes)
        yield make_title("Types", f"on {mesh}: of each tensor / of its gradient")
        yield summarize_types(types)
        if types.tensors:
            yield _render_tensors(types, is_folded=is_folded)


def summarize_types(types: InferredTypes) -> Text:
    """Return how many types were inferred, and of how many tensors the values do not decide."""
    count = plural(len(types.tensors), "tensor")
    line = Text(count, "bold").append(f" in {plural(types.num_runs, 'run')} ", "")
    line.append("in double precision" if types.is_exact else "in the model's own precision")
    num_open = count_undecided(types)
    if num_open:
        line.append(f"; the values of {num_open:,} do not decide along some axis (?)", "yellow")
    num_declared, num_agreeing = types.count_declared()
    if num_declared:
        style = "" if num_agreeing == num_declared else "bold red"
        share = f"{num_agreeing:,} of {num_declared:,} ({num_agreeing / num_declared:.1%})"
        line.append("; of the types that placements and annotations declare, ")
        line.append(share, style).append(" are those of the values")
    return line.append(".", "")


def count_undecided(types: InferredTypes) -> int:
    """Count the tensors whose values do not decide the type along some axis."""
    return sum(any(axis.forward == UNDECIDED for axis in t.axes) for t in types.tensors)


def group_tensors(
    tensors: Sequence[TensorTypes], *, is_folded: bool = True
) -> list[list[TensorTypes]]:
    """Group the tensors that differ only in their layer, in order of first appearance."""
    groups: dict[object, list[TensorTypes]] = {}
    for index, tensor in enumerate(tensors):
        pairs = tuple(axis.describe() for axis in tensor.axes)
        key = (tensor.describe(is_folded=True), tensor.role, tensor.call, tensor.order, pairs)
        groups.setdefault(key if is_folded else index, []).append(tensor)
    return list(groups.values())


def name_group(group: Sequence[TensorTypes]) -> str:
    """The name of a tensor, or of the same one in several layers: `layers.*.mlp[0]`."""
    return group[0].describe(is_folded=len(group) > 1)


def _render_tensors(types: InferredTypes, *, is_folded: bool) -> RenderableType:
    groups = group_tensors(types.tensors, is_folded=is_folded)
    axes = [axis.name for axis in types.axes]
    columns = {
        "tensor": Column("tensor", ColumnStyle.NAME, 24),
        "role": Column("", ColumnStyle.NAME, 9),
        **{f"axis {name}": Column(name, ColumnStyle.WORDS) for name in axes},
        "note": Column("", ColumnStyle.PROSE, 16),
    }
    rows = [_make_row(group) for group in groups]
    return Grid(columns, rows, narrower_layouts(list(columns), "note"))


def _make_row(group: Sequence[TensorTypes]) -> Row:
    tensor = group[0]
    is_boundary = tensor.role in (TensorRole.INPUT, TensorRole.OUTPUT)
    name = make_text(name_group(group))
    if len(group) > 1:
        name.append(f" ×{len(group):,}", "dim")
    notes = [
        tensor.order,
        f"call {tensor.call + 1}" if tensor.call is not None else "",
        "" if is_boundary or tensor.is_matched else "not the single device's",
    ]
    row: dict[str, Cell] = {
        "tensor": name,
        "role": make_text(tensor.role, "dim"),
        "note": make_text(", ".join(filter(None, notes)), "dim"),
    }
    for axis in tensor.axes:
        style = _STYLES.get(axis.forward, "")
        row[f"axis {axis.axis}"] = make_text(axis.describe(), style)
    return row
