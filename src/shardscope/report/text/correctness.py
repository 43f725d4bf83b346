"""Parallel programs and parity checks: collectives, fallbacks, placements, and the verdict on
each tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from shardscope.record import (
    FINE,
    TOLERABLE,
    Agreement,
    Fallback,
    Finding,
    Inserted,
    Parallelization,
    Parity,
    Phase,
    Placed,
    PlacedKind,
    RankMemory,
    Recording,
    Source,
    Suspect,
    TensorKind,
    TensorVerdict,
    format_ranks,
)
from shardscope.record.layer_names import fold_indices, fold_layers_in_text, join_layers_in_texts
from shardscope.record.units import describe_all, format_bytes, format_count, plural
from shardscope.report.text.style import SourceLine, format_source, make_text, make_title
from shardscope.report.text.table import Cell, Column, ColumnStyle, Grid, Row, narrower_layouts

_MAX_ROWS = 60
_MAX_WRONG = 12
_INDENT = 2
_MAX_LINES = 3  # lines of a cause
_COLLECTIVE_COLUMNS = {
    "what": Column("collective", ColumnStyle.NAME, 18),
    "what and why": Column("collective and cause", ColumnStyle.PROSE, 24),
    "phase": Column("", ColumnStyle.NAME, 8),
    "count": Column("count"),
    "each": Column("input each"),
    "why": Column("because of", ColumnStyle.PROSE, 32),
}
_COLLECTIVE_LAYOUTS = [
    ["what", "phase", "count", "each", "why"],
    ["what and why", "phase", "count", "each"],
    ["what and why", "count", "each"],
]
_TENSOR_COLUMNS = {
    "name": Column("tensor", ColumnStyle.NAME, 30),
    "kind": Column("", ColumnStyle.NAME, 9),
    "shape": Column("shape"),
    "dtype": Column("dtype", ColumnStyle.NAME, 8),
    "placements": Column("placements", ColumnStyle.NAME, 12),
    "rule": Column("rule", ColumnStyle.NAME, 8),
    "local": Column("local"),
}
_MEMORY_COLUMNS = {
    "ranks": Column("ranks", ColumnStyle.NAME, 6),
    "parameters": Column("parameters"),
    "buffers": Column("buffers"),
    "inputs": Column("inputs"),
    "gradients": Column("gradients"),
    "intermediates": Column("intermediates"),
    "peak": Column("peak"),
    "where": Column("peak in", ColumnStyle.NAME, 8),
}
_WRONG = "bold red"

_Record = TypeVar("_Record", Inserted, Fallback, Placed)


def render_parallel(recording: Recording, *, is_folded: bool = True) -> Iterator[RenderableType]:
    """Render each parallel program; nothing if there are none."""
    for program in recording.parallel:
        yield make_title("Parallel program", _note_parallelization(program))
        yield summarize_parallel(program)
        yield from _render_collectives(program, is_folded=is_folded)
        yield from _render_fallbacks(program, is_folded=is_folded)
        yield from _render_placements(program, is_folded=is_folded)
        yield from _render_memory(program)
        yield make_title("Verification", "all ranks in one process against the single device")
        yield from _render_proof(program)


def _note_parallelization(program: Parallelization) -> str:
    mesh = " × ".join(f"{axis.name}={axis.size:,}" for axis in program.axes)
    name = f"{program.program} on" if program.program else "on"
    use = "for training" if program.is_training else "forward only"
    return f"{name} {mesh}, {use}, {plural(program.num_ops, 'op')}"


def summarize_parallel(program: Parallelization) -> Text:
    """Count collectives and fallbacks."""
    kinds = Counter(str(collective.kind) for collective in program.inserted)
    sent = sum(collective.size_bytes for collective in program.inserted)
    line = Text(plural(len(program.inserted), "collective"), "bold").append(" per rank")
    if kinds:
        named = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
        line.append(f" ({named}), {format_bytes(sent)} input")
    line.append("; ").append(
        plural(len(program.fallbacks), "fallback"), "yellow" if program.fallbacks else ""
    )
    return line


def group_identical(
    records: Sequence[_Record], key: Callable[[_Record], object], *, is_folded: bool
) -> list[list[_Record]]:
    """Group records with equal keys, in order of first appearance; all apart unless `is_folded`."""
    groups: dict[object, list[_Record]] = {}
    for index, record in enumerate(records):
        groups.setdefault(key(record) if is_folded else index, []).append(record)
    return list(groups.values())


def layer_group_key(record: Inserted | Fallback) -> object:
    """Return a key that is equal for records that differ only in their layer."""
    if isinstance(record, Inserted):
        return (
            record.phase,
            record.kind,
            record.axis,
            record.size_bytes,
            fold_layers_in_text(record.cause),
        )
    return (
        record.axis,
        record.kind,
        record.op,
        record.placements,
        fold_layers_in_text(record.module),
    )


def _render_collectives(program: Parallelization, *, is_folded: bool) -> Iterator[RenderableType]:
    if not program.inserted:
        return
    yield make_title("Collectives", "in the order of one rank; identical layers share a row")
    groups = group_identical(
        program.inserted,
        layer_group_key,
        is_folded=is_folded,
    )
    rows = [_collective_row(group) for group in groups]
    yield _limit_rows(_COLLECTIVE_COLUMNS, rows, _COLLECTIVE_LAYOUTS, is_folded=is_folded)


def _collective_row(group: Sequence[Inserted]) -> Row:
    collective = group[0]
    label = f"{collective.kind}[{collective.axis}]"
    why = join_layers_in_texts([same.cause for same in group])
    # Backward collectives have the source line of the forward op.
    source = collective.source if collective.phase is Phase.FORWARD else None
    return {
        "what": make_text(label),
        "phase": make_text(collective.phase, "dim"),
        "count": format_count(len(group)),
        "each": format_bytes(collective.size_bytes),
        "why": lambda width: _explain(why, source, width),
        "what and why": lambda width: Group(
            make_text(label, width=width),
            Padding(_explain(why, source, width - _INDENT), (0, 0, 0, _INDENT)),
        ),
    }


def _explain(why: str, source: Source | None, width: int) -> Text:
    text = make_text(why, width=_MAX_LINES * width)
    if source is not None:
        text.append("\n").append_text(format_source(source, width=width))
    return text


def _render_fallbacks(program: Parallelization, *, is_folded: bool) -> Iterator[RenderableType]:
    if not program.fallbacks:
        return
    yield make_title("Fallbacks", "ops that cannot run on sharded inputs")
    groups = group_identical(
        program.fallbacks,
        layer_group_key,
        is_folded=is_folded,
    )
    shown = groups[:_MAX_ROWS] if is_folded else groups
    yield from (_render_fallback(group) for group in shown)
    if len(shown) < len(groups):
        yield Text(f"… {len(groups) - len(shown):,} more: --no-fold shows all", "dim")


def _render_fallback(group: Sequence[Fallback]) -> RenderableType:
    fallback = group[0]
    head = (
        make_text(fallback.kind, "yellow").append(" ").append_text(make_text(fallback.op, "bold"))
    )
    head.append_text(
        make_text(f"  {join_layers_in_texts([same.module for same in group])}", width=80)
    )
    if len(group) > 1:
        head.append(f" ×{len(group):,}", "bold")
    placements = ", ".join(fallback.placements)
    moved = sum(same.size_bytes for same in group)
    body: list[RenderableType] = [
        make_text(
            f"given {placements} along {fallback.axis}; moves {format_bytes(moved)}", width=300
        )
    ]
    if fallback.source is not None:
        body.append(SourceLine(fallback.source))
    body.append(make_text(f"→ {fallback.remedy}", "green", width=400))
    return Group(head, Padding(Group(*body), (0, 0, 0, _INDENT)))


def _render_placements(program: Parallelization, *, is_folded: bool) -> Iterator[RenderableType]:
    if not program.placed:
        return
    yield make_title("Placements", "S(dim): sharded, R: replicated; local: bytes on the first rank")
    axes = [axis.name for axis in program.axes]
    groups = group_identical(program.placed, _facts, is_folded=is_folded)
    rows = [_tensor_row(group, axes) for group in groups]
    layouts = narrower_layouts(list(_TENSOR_COLUMNS), "dtype", "rule", "kind", "local")
    yield _limit_rows(_TENSOR_COLUMNS, rows, layouts, is_folded=is_folded)


def _facts(tensor: Placed) -> object:
    facts = (tensor.kind, tensor.shape, tensor.local_shape, tensor.dtype, tensor.placements)
    return (
        fold_layers_in_text(tensor.name),
        facts,
        tuple(map(fold_layers_in_text, tensor.rules)),
    )


def _tensor_row(group: Sequence[Placed], axes: list[str]) -> Row:
    tensor = group[0]
    name = make_text(join_layers_in_texts([same.name for same in group]))
    if len(group) > 1:
        name.append(f" ×{len(group):,}", "bold")
    shapes = [_format_shape(shape) for shape in (tensor.shape, tensor.local_shape)]
    placed = zip(axes, tensor.placements, strict=False)
    row: dict[str, Cell] = {
        "name": name,
        "kind": "" if tensor.kind is PlacedKind.PARAMETER else make_text(tensor.kind, "dim"),
        "shape": " → ".join(dict.fromkeys(shapes)) + (" (open)" if tensor.is_open else ""),
        "dtype": make_text(tensor.dtype),
        "placements": make_text(" ".join(f"{axis}:{placement}" for axis, placement in placed)),
        "rule": make_text(", ".join(tensor.rules)),
        "local": format_bytes(tensor.local_bytes),
    }
    return row


def _format_shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) if shape else "()"


def _render_memory(program: Parallelization) -> Iterator[RenderableType]:
    if not program.rank_memory:
        return
    yield make_title("Memory per rank", "tensors of one step, at the sizes it was exported with")
    layouts = narrower_layouts(list(_MEMORY_COLUMNS), "where", "inputs", "buffers")
    yield Grid(_MEMORY_COLUMNS, [_memory_row(memory) for memory in program.rank_memory], layouts)


def _memory_row(memory: RankMemory) -> Row:
    sizes = {
        "parameters": memory.parameter_bytes,
        "buffers": memory.buffer_bytes,
        "inputs": memory.input_bytes,
        "gradients": memory.gradient_bytes,
        "intermediates": memory.intermediate_bytes,
        "peak": memory.peak_bytes,
    }
    where = memory.peak_module or memory.peak_node
    formatted: dict[str, Cell] = {
        key: format_bytes(value) if value else "·" for key, value in sizes.items()
    }
    return {"ranks": format_ranks(memory.ranks), "where": make_text(where), **formatted}


def _render_proof(program: Parallelization) -> Iterator[RenderableType]:
    yield summarize_proof(program)
    wrong = [verdict for verdict in program.verdicts if verdict.agreement not in FINE]
    yield from (_render_wrong(verdict) for verdict in wrong[:_MAX_WRONG])
    if len(wrong) > _MAX_WRONG:
        yield Text(f"… and {len(wrong) - _MAX_WRONG:,} more", "dim")


def summarize_proof(program: Parallelization) -> Text:
    """State whether the program computes the same, or why that is not known."""
    if not program.verdicts:
        why = f": {program.unverified}" if program.unverified else ""
        return make_text(f"Not verified{why}.", "yellow", width=400)
    num_wrong = sum(verdict.agreement not in FINE for verdict in program.verdicts)
    count = plural(len(program.verdicts), "tensor")
    kinds = Counter(str(verdict.kind) for verdict in program.verdicts)
    named = ", ".join(plural(number, kind) for kind, number in kinds.items())
    if not num_wrong:
        agreement = describe_all(len(program.verdicts), "tensor", "agree")
        return Text(agreement, "bold green").append(f" ({named}).", "")
    return Text(f"{num_wrong:,} of {count} differ", _WRONG).append(f" ({named}).", "")


def _render_wrong(verdict: TensorVerdict) -> Text:
    line = Text("  ").append_text(make_text(f"{verdict.kind} {verdict.name}", "bold", width=120))
    line.append("  ").append(verdict.agreement.replace("_", " "), "red")
    if verdict.error is not None and verdict.noise is not None:
        line.append(f"  off by {verdict.error:.1e}, noise {verdict.noise:.1e}")
    if verdict.detail:
        line.append("  ").append_text(make_text(verdict.detail, "dim", width=200))
    return line


def _limit_rows(
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


_STYLES: dict[Agreement, str] = {
    Agreement.EQUAL: "green",
    Agreement.CLOSE: "green",
    Agreement.ROUNDED: "yellow",
    Agreement.RANDOM: "yellow",
}
_COLUMNS = {
    "tensor": Column("tensor", ColumnStyle.NAME, 18),
    "kind": Column("", ColumnStyle.NAME, 8),
    "verdict": Column("verdict", ColumnStyle.WORDS),
    "error": Column("error"),
    "noise": Column("noise"),
    "ranks": Column("ranks"),
    "suspect": Column("likely cause", ColumnStyle.WORDS),
    "detail": Column("", ColumnStyle.PROSE, 30),
}


def render_parity(recording: Recording, *, is_folded: bool = True) -> Iterator[RenderableType]:
    """Render the verdict and a table of tensors; nothing if nothing was compared."""
    for parity in recording.parity:
        yield make_title("Parity", _note_parity(parity))
        yield summarize_parity(parity, recording.findings)
        if parity.tensors:
            yield _render_tensors(parity, is_folded=is_folded)
        num_hidden = len(parity.tensors) - len(_choose_tensors(parity, is_folded=is_folded))
        if num_hidden:
            yield Text(f"… {num_hidden:,} tensors of other steps: --no-fold shows all", "dim")


def _note_parity(parity: Parity) -> str:
    mesh = " × ".join(f"{axis.name}={axis.size:,}" for axis in parity.axes)
    location = "in separate processes" if parity.is_in_processes else "in one process"
    noise = "double precision" if parity.has_exact else "perturbed weights"
    return f"on {mesh}, all ranks {location}; relative errors, noise measured with {noise}"


def summarize_parity(parity: Parity, findings: Sequence[Finding]) -> Text:
    """Return the verdict in one line; findings of the recording name what is too noisy."""
    wrong = [tensor for tensor in parity.tensors if tensor.agreement not in TOLERABLE]
    count = plural(len(parity.tensors), "tensor")
    kinds = "outputs, gradients and changed buffers" if parity.has_backward else "outputs"
    steps = {tensor.step for tensor in parity.tensors if tensor.step is not None}
    if steps:
        kinds = f"losses, gradients, optimizer state and more of {plural(len(steps), 'step')}"
    if not parity.tensors:
        return Text("Nothing was compared: the step produced no tensors.", _WRONG)
    if wrong:
        step = "" if wrong[0].step is None else f", first in step {wrong[0].step}"
        return Text(f"{len(wrong):,} of {count} differ{step}", _WRONG).append(f" ({kinds}).", "")
    odd = [tensor for tensor in parity.tensors if tensor.agreement not in FINE]
    agreement = describe_all(len(parity.tensors), "tensor", "agree")
    line = Text(agreement, "bold green").append(f" ({kinds})", "")
    if odd:
        line.append(f", {len(odd):,} of them up to random numbers or rounding", "yellow")
    num_noisy = sum(finding.rule == "parity-noisy" for finding in findings)
    if num_noisy:
        line.append(f", but {num_noisy:,} of them would agree with almost any result", "yellow")
    return line.append(".", "")


def _choose_tensors(parity: Parity, *, is_folded: bool) -> Sequence[TensorVerdict]:
    """The tensors of the first training step that differs, as later ones follow from it; else all.

    If all agree those of the last step, whose state depends on all before it.
    """
    steps = {tensor.step for tensor in parity.tensors}
    wrong = (tensor.step for tensor in parity.tensors if tensor.agreement not in TOLERABLE)
    step = next(wrong, max(filter(None, steps), default=None))
    if not is_folded or step is None:
        return parity.tensors
    return [tensor for tensor in parity.tensors if tensor.step == step]


def _render_tensors(parity: Parity, *, is_folded: bool) -> RenderableType:
    folded: dict[object, list[TensorVerdict]] = {}
    for index, tensor in enumerate(_choose_tensors(parity, is_folded=is_folded)):
        key = (tensor.kind, fold_indices(tensor.name), tensor.agreement, tensor.suspect)
        folded.setdefault(key if is_folded else index, []).append(tensor)
    # Wrong tensors come first, in the order of the model.
    groups = sorted(folded.values(), key=lambda group: group[0].agreement in TOLERABLE)
    layouts = narrower_layouts(list(_COLUMNS), "detail", "ranks", "kind", "noise")
    # Only the first divergence has a suspect; later differences follow from it.
    hidden = Suspect.UNKNOWN if parity.divergences else None
    return Grid(_COLUMNS, [_make_row(group, hidden) for group in groups], layouts)


def _make_row(verdicts: Sequence[TensorVerdict], hidden: Suspect | None) -> Row:
    worst = max(verdicts, key=lambda verdict: verdict.error or 0.0)
    suspect = "" if worst.suspect in (None, hidden) else str(worst.suspect)
    row: dict[str, Cell] = {
        "tensor": _name(verdicts),
        "kind": worst.kind,
        "verdict": make_text(
            worst.agreement.replace("_", " "), _STYLES.get(worst.agreement, _WRONG)
        ),
        "error": _format_error(worst.error),
        "noise": _format_error(worst.noise),
        "ranks": format_ranks(worst.ranks),
        "suspect": make_text(suspect.replace("_", " ")),
        "detail": make_text(worst.detail, "dim", width=300),
    }
    return row


def _name(verdicts: Sequence[TensorVerdict]) -> Text:
    name = _name_line(verdicts[0]) or verdicts[0].name or "the output"
    if len(verdicts) == 1:
        return make_text(name)
    return make_text(fold_indices(name)).append(f" ×{len(verdicts)}", "dim")


def _name_line(verdict: TensorVerdict) -> str:
    """`train.py:20` for a number that was read there, whatever the folder; else empty."""
    path, _, line = verdict.name.rpartition(":")
    is_line = verdict.kind is TensorKind.REPORTED and line.partition(" ")[0].isdecimal()
    return f"{PurePath(path).name}:{line}" if is_line else ""


def _format_error(error: float | None) -> str:
    if error is None:
        return ""
    # A relative error is meaningless if the expected values are zero up to rounding noise.
    return "noise" if error > 1e3 else f"{error:.1e}" if error else "0"
