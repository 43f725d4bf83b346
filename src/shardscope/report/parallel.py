"""A program that was cut for a mesh: its collectives, its fallbacks, what lies where, the proof."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from shardscope.record import (
    FINE,
    Fallback,
    Inserted,
    Parallelization,
    Phase,
    Placed,
    PlacedKind,
    RankMemory,
    Recording,
    Source,
    TensorVerdict,
    format_ranks,
)
from shardscope.report.grid import Cell, Column, Grid, Look, Row, leave_out
from shardscope.report.layout import make_text, make_title, plural
from shardscope.report.lines import SourceLine, format_source
from shardscope.report.numbered import fold_numbers, name_all
from shardscope.report.units import format_bytes, format_count

__all__ = ["fold_alike", "likeness_of", "render_parallel", "summarize_parallel", "summarize_proof"]

_MAX_ROWS = 60
_MAX_WRONG = 12
_INDENT = 2
_MAX_LINES = 3  # of a cause
_COLLECTIVE_COLUMNS = {
    "what": Column("collective", Look.NAME, 18),
    "what and why": Column("collective and cause", Look.PROSE, 24),
    "phase": Column("", Look.NAME, 8),
    "count": Column("count"),
    "each": Column("input each"),
    "why": Column("because of", Look.PROSE, 32),
}
_COLLECTIVE_LAYOUTS = [
    ["what", "phase", "count", "each", "why"],
    ["what and why", "phase", "count", "each"],
    ["what and why", "count", "each"],
]
_TENSOR_COLUMNS = {
    "name": Column("tensor", Look.NAME, 30),
    "kind": Column("", Look.NAME, 9),
    "shape": Column("shape"),
    "dtype": Column("dtype", Look.NAME, 8),
    "lies": Column("placements", Look.NAME, 12),
    "rule": Column("rule", Look.NAME, 8),
    "here": Column("local"),
}
_MEMORY_COLUMNS = {
    "ranks": Column("ranks", Look.NAME, 6),
    "parameters": Column("parameters"),
    "buffers": Column("buffers"),
    "inputs": Column("inputs"),
    "gradients": Column("gradients"),
    "intermediates": Column("intermediates"),
    "peak": Column("peak"),
    "where": Column("peak in", Look.NAME, 8),
}
_WRONG = "bold red"

_Record = TypeVar("_Record", Inserted, Fallback, Placed)


def render_parallel(recording: Recording, *, is_folded: bool = True) -> Iterator[RenderableType]:
    """Each program in full; nothing if there is none."""
    for found in recording.parallel:
        yield make_title("Parallel program", _note(found))
        yield summarize_parallel(found)
        yield from _render_collectives(found, is_folded=is_folded)
        yield from _render_fallbacks(found, is_folded=is_folded)
        yield from _render_tensors(found, is_folded=is_folded)
        yield from _render_memory(found)
        yield make_title("Verification", "all ranks in one process against the single device")
        yield from _render_proof(found)


def _note(found: Parallelization) -> str:
    mesh = " × ".join(f"{axis.name}={axis.size:,}" for axis in found.axes)
    name = f"{found.program} on" if found.program else "on"
    use = "for training" if found.is_training else "forward only"
    return f"{name} {mesh}, {use}, {plural(found.num_ops, 'op')}"


def summarize_parallel(found: Parallelization) -> Text:
    """How many collectives and fallbacks."""
    kinds = Counter(str(one.kind) for one in found.inserted)
    sent = sum(one.size_bytes for one in found.inserted)
    line = Text(plural(len(found.inserted), "collective"), "bold").append(" per rank")
    if kinds:
        named = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
        line.append(f" ({named}), {format_bytes(sent)} input")
    line.append("; ").append(
        plural(len(found.fallbacks), "fallback"), "yellow" if found.fallbacks else ""
    )
    return line


def fold_alike(
    records: Sequence[_Record], key: Callable[[_Record], object], *, is_folded: bool
) -> list[list[_Record]]:
    """Records with the same key together, in the order of the first of each."""
    groups: dict[object, list[_Record]] = {}
    for index, one in enumerate(records):
        groups.setdefault(key(one) if is_folded else index, []).append(one)
    return list(groups.values())


def likeness_of(one: Inserted | Fallback) -> object:
    """The same for those that differ by their layer alone."""
    if isinstance(one, Inserted):
        return one.phase, one.kind, one.axis, one.size_bytes, fold_numbers(one.cause)
    return one.axis, one.kind, one.op, one.placements, fold_numbers(one.module)


def _render_collectives(found: Parallelization, *, is_folded: bool) -> Iterator[RenderableType]:
    if not found.inserted:
        return
    yield make_title("Collectives", "in the order of one rank; identical layers share a row")
    groups = fold_alike(
        found.inserted,
        likeness_of,
        is_folded=is_folded,
    )
    rows = [_collective_row(group) for group in groups]
    yield _cut(_COLLECTIVE_COLUMNS, rows, _COLLECTIVE_LAYOUTS, is_folded=is_folded)


def _collective_row(group: Sequence[Inserted]) -> Row:
    one = group[0]
    what = f"{one.kind}[{one.axis}]"
    why = name_all([same.cause for same in group])
    # Backward, the line is the one that the reader has seen forward.
    source = one.source if one.phase is Phase.FORWARD else None
    return {
        "what": make_text(what),
        "phase": make_text(one.phase, "dim"),
        "count": format_count(len(group)),
        "each": format_bytes(one.size_bytes),
        "why": lambda width: _explain(why, source, width),
        "what and why": lambda width: Group(
            make_text(what, width=width),
            Padding(_explain(why, source, width - _INDENT), (0, 0, 0, _INDENT)),
        ),
    }


def _explain(why: str, source: Source | None, width: int) -> Text:
    text = make_text(why, width=_MAX_LINES * width)
    if source is not None:
        text.append("\n").append_text(format_source(source, width=width))
    return text


def _render_fallbacks(found: Parallelization, *, is_folded: bool) -> Iterator[RenderableType]:
    if not found.fallbacks:
        return
    yield make_title("Fallbacks", "ops that cannot run on sharded inputs")
    groups = fold_alike(
        found.fallbacks,
        likeness_of,
        is_folded=is_folded,
    )
    shown = groups[:_MAX_ROWS] if is_folded else groups
    yield from (_render_fallback(group) for group in shown)
    if len(shown) < len(groups):
        yield Text(f"… {len(groups) - len(shown):,} more: --no-fold shows all", "dim")


def _render_fallback(group: Sequence[Fallback]) -> RenderableType:
    one = group[0]
    head = make_text(one.kind, "yellow").append(" ").append_text(make_text(one.op, "bold"))
    head.append_text(make_text(f"  {name_all([same.module for same in group])}", width=80))
    if len(group) > 1:
        head.append(f" ×{len(group):,}", "bold")
    lies = ", ".join(one.placements)
    moved = sum(same.size_bytes for same in group)
    body: list[RenderableType] = [
        make_text(f"given {lies} along {one.axis}; moves {format_bytes(moved)}", width=300)
    ]
    if one.source is not None:
        body.append(SourceLine(one.source))
    body.append(make_text(f"→ {one.remedy}", "green", width=400))
    return Group(head, Padding(Group(*body), (0, 0, 0, _INDENT)))


def _render_tensors(found: Parallelization, *, is_folded: bool) -> Iterator[RenderableType]:
    if not found.placed:
        return
    yield make_title("Placements", "S(dim): sharded, R: replicated; local: bytes on the first rank")
    axes = [axis.name for axis in found.axes]
    groups = fold_alike(found.placed, _facts, is_folded=is_folded)
    rows = [_tensor_row(group, axes) for group in groups]
    layouts = leave_out(list(_TENSOR_COLUMNS), "dtype", "rule", "kind", "here")
    yield _cut(_TENSOR_COLUMNS, rows, layouts, is_folded=is_folded)


def _facts(one: Placed) -> object:
    facts = (one.kind, one.shape, one.local_shape, one.dtype, one.placements)
    return fold_numbers(one.name), facts, tuple(map(fold_numbers, one.rules))


def _tensor_row(group: Sequence[Placed], axes: list[str]) -> Row:
    one = group[0]
    name = make_text(name_all([same.name for same in group]))
    if len(group) > 1:
        name.append(f" ×{len(group):,}", "bold")
    shapes = [_format_shape(shape) for shape in (one.shape, one.local_shape)]
    placed = zip(axes, one.placements, strict=False)
    row: dict[str, Cell] = {
        "name": name,
        "kind": "" if one.kind is PlacedKind.PARAMETER else make_text(one.kind, "dim"),
        "shape": " → ".join(dict.fromkeys(shapes)) + (" (open)" if one.is_open else ""),
        "dtype": make_text(one.dtype),
        "lies": make_text(" ".join(f"{axis}:{placement}" for axis, placement in placed)),
        "rule": make_text(", ".join(one.rules)),
        "here": format_bytes(one.local_bytes),
    }
    return row


def _format_shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) if shape else "()"


def _render_memory(found: Parallelization) -> Iterator[RenderableType]:
    if not found.rank_memory:
        return
    yield make_title("Memory per rank", "tensors of one step, at the sizes it was exported with")
    layouts = leave_out(list(_MEMORY_COLUMNS), "where", "inputs", "buffers")
    yield Grid(_MEMORY_COLUMNS, [_memory_row(one) for one in found.rank_memory], layouts)


def _memory_row(one: RankMemory) -> Row:
    figures = {
        "parameters": one.parameter_bytes,
        "buffers": one.buffer_bytes,
        "inputs": one.input_bytes,
        "gradients": one.gradient_bytes,
        "intermediates": one.intermediate_bytes,
        "peak": one.peak_bytes,
    }
    where = one.peak_module or one.peak_node
    formatted: dict[str, Cell] = {
        key: format_bytes(value) if value else "·" for key, value in figures.items()
    }
    return {"ranks": format_ranks(one.ranks), "where": make_text(where), **formatted}


def _render_proof(found: Parallelization) -> Iterator[RenderableType]:
    yield summarize_proof(found)
    wrong = [one for one in found.verdicts if one.agreement not in FINE]
    yield from (_render_wrong(one) for one in wrong[:_MAX_WRONG])
    if len(wrong) > _MAX_WRONG:
        yield Text(f"… and {len(wrong) - _MAX_WRONG:,} more", "dim")


def summarize_proof(found: Parallelization) -> Text:
    """Whether it is the same, or why that is not known."""
    if not found.verdicts:
        why = f": {found.unverified}" if found.unverified else ""
        return make_text(f"Not verified{why}.", "yellow", width=400)
    num_wrong = sum(one.agreement not in FINE for one in found.verdicts)
    count = plural(len(found.verdicts), "tensor")
    kinds = Counter(str(one.kind) for one in found.verdicts)
    named = ", ".join(plural(number, kind) for kind, number in kinds.items())
    if not num_wrong:
        return Text("All ", "bold green").append(count, "bold green").append(f" agree ({named}).")
    return Text(f"{num_wrong:,} of {count} differ", _WRONG).append(f" ({named}).", "")


def _render_wrong(one: TensorVerdict) -> Text:
    line = Text("  ").append_text(make_text(f"{one.kind} {one.name}", "bold", width=120))
    line.append("  ").append(one.agreement.replace("_", " "), "red")
    if one.error is not None and one.noise is not None:
        line.append(f"  off by {one.error:.1e}, noise {one.noise:.1e}")
    if one.detail:
        line.append("  ").append_text(make_text(one.detail, "dim", width=200))
    return line


def _cut(
    columns: dict[str, Column],
    rows: list[Row],
    layouts: Sequence[Sequence[str]],
    *,
    is_folded: bool,
) -> RenderableType:
    shown = rows[:_MAX_ROWS] if is_folded else rows
    num_hidden = len(rows) - len(shown)
    note = f"… {num_hidden:,} more: --no-fold shows all" if num_hidden else ""
    return Grid(columns, shown, layouts, note=note)
