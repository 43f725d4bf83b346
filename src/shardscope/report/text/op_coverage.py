"""Which ops can be sharded, and what blocks sharding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from shardscope.record import Coverage, OpCoverage, OpVerdict, Recording
from shardscope.record.units import UNKNOWN, format_bytes, format_count, format_flops, plural
from shardscope.report.text.style import SourceLine, format_share, make_text, make_title
from shardscope.report.text.table import Cell, Column, ColumnStyle, Grid, Row, narrower_layouts

_MAX_BLOCKERS = 5
COVERED = (OpVerdict.SHARDED, OpVerdict.DECOMPOSED, OpVerdict.REDISTRIBUTED)
_STYLES = {
    OpVerdict.LOCAL: "dim",
    OpVerdict.SHARDED: "green",
    OpVerdict.DECOMPOSED: "green",
    OpVerdict.REDISTRIBUTED: "yellow",
    OpVerdict.REPLICATED: "yellow",
    OpVerdict.MISSING: "bold red",
    OpVerdict.WRONG: "bold red",
}
_COLUMNS = {
    "op": Column("op", ColumnStyle.NAME, 28),
    "verdict": Column("verdict", ColumnStyle.NAME, 13),
    "forward": Column("forward"),
    "backward": Column("backward"),
    "flops": Column("FLOPs"),
    "sends": Column("sends"),
    "where": Column("first of its modules", ColumnStyle.NAME, 12),
}


def render_coverage(recording: Recording) -> Iterator[RenderableType]:
    """Render a line per level, and all ops of the first; nothing if there is no coverage."""
    for index, coverage in enumerate(recording.coverage):
        if index == 0 or coverage.rank != recording.coverage[index - 1].rank:
            yield make_title(_title(coverage, recording), _note(coverage, recording))
            yield _render_ops(coverage)
            yield from _render_blockers(coverage)
            yield make_title(
                "Levels", "op calls and FLOPs that run sharded; local ones are counted separately"
            )
        yield make_text(f"{coverage.level:<10}").append_text(summarize_level(coverage))


def _title(coverage: Coverage, recording: Recording) -> str:
    has_many = len({coverage.rank for coverage in recording.coverage}) > 1
    rank = f", rank {coverage.rank}" if has_many else ""
    return f"Op coverage ({coverage.level}{rank})"


def _note(coverage: Coverage, recording: Recording) -> str:
    mesh = " × ".join(f"{axis.name}={axis.size:,}" for axis in coverage.axes)
    how = "at the model's placements" if coverage.has_plan else "each dim of each input in turn"
    return f"on {mesh}, {how}{', simulated' if recording.run.is_simulated else ''}"


def summarize_level(coverage: Coverage) -> Text:
    """State the share of calls, FLOPs and ops that shard, and how many ops are local."""
    covered = [op for op in coverage.ops if op.verdict in COVERED]
    judged = [op for op in coverage.ops if op.verdict is not OpVerdict.LOCAL]
    local = [op for op in coverage.ops if op.verdict is OpVerdict.LOCAL]
    line = Text()
    if judged:
        calls, all_calls = _count(covered), _count(judged)
        line.append(format_share(calls, all_calls), "bold").append(
            f" of {plural(all_calls, 'call')}"
        )
        flops, all_flops = _add_flops(covered), _add_flops(judged)
        if all_flops is not None:
            line.append(", ").append(format_share(flops or 0, all_flops), "bold")
            line.append(f" of {format_flops(all_flops)}")
        line.append(f"; {len(covered)} of {plural(len(judged), 'op')} shard")
    if local:
        line.append("; " if judged else "").append(
            f"{plural(len(local), 'op')} on local tensors ({plural(_count(local), 'call')})"
        )
    return line if coverage.ops else Text("no ops")


def _count(ops: Sequence[OpCoverage]) -> int:
    return sum(op.num_forward + op.num_backward for op in ops)


def _add_flops(ops: Sequence[OpCoverage]) -> int | None:
    """Sum FLOPs of ops with a known formula; None if there are none."""
    known = [op.flops for op in ops if op.flops is not None]
    return sum(known) if known else None


def _render_ops(coverage: Coverage) -> RenderableType:
    if not coverage.ops:
        return Text("The model called no ops.")
    layouts = narrower_layouts(list(_COLUMNS), "where", "sends", "backward")
    return Grid(_COLUMNS, [_make_row(op) for op in coverage.ops], layouts)


def _make_row(op: OpCoverage) -> Row:
    moved = max((move.num_bytes for move in op.moves), default=0)
    row: dict[str, Cell] = {
        "op": make_text(op.op),
        "verdict": make_text(op.verdict, _STYLES[op.verdict]),
        "forward": format_count(op.num_forward),
        "backward": format_count(op.num_backward),
        "flops": UNKNOWN if op.flops is None else format_flops(op.flops) if op.flops else "·",
        "sends": format_bytes(moved) if moved else "",
        "where": make_text(_name_modules(op)),
    }
    return row


def _name_modules(op: OpCoverage) -> str:
    if not op.modules:
        return ""
    first = op.modules[0] or "the root"
    return first if len(op.modules) == 1 else f"{first} + {len(op.modules) - 1:,}"


def list_blockers(coverage: Coverage) -> list[OpCoverage]:
    """List the ops that do not shard, most FLOPs first, then most calls."""
    blockers = [op for op in coverage.ops if op.verdict not in (*COVERED, OpVerdict.LOCAL)]
    return sorted(
        blockers,
        key=lambda blocker: (
            -(blocker.flops or 0),
            -blocker.num_forward - blocker.num_backward,
            blocker.op,
        ),
    )


def _render_blockers(coverage: Coverage) -> Iterator[RenderableType]:
    blockers = list_blockers(coverage)
    if not blockers:
        return
    yield make_title("What blocks sharding first", "by FLOPs, then by calls")
    yield from (_render_blocker(op) for op in blockers[:_MAX_BLOCKERS])
    if len(blockers) > _MAX_BLOCKERS:
        yield Text(f"… and {len(blockers) - _MAX_BLOCKERS:,} more, in the table above", "dim")


def _render_blocker(op: OpCoverage) -> RenderableType:
    head = make_text(op.verdict, _STYLES[op.verdict]).append(" ")
    head.append_text(make_text(op.op, "bold", width=80)).append("  ")
    head.append_text(make_text(_name_modules(op), width=80))
    body: list[RenderableType] = []
    if op.detail:
        body.append(make_text(op.detail, width=300))
    if op.sources:
        body.append(SourceLine(op.sources[0]))
    if op.remedy:
        body += [make_text(line, "green", width=200) for line in f"→ {op.remedy}".splitlines()]
    return Group(head, Padding(Group(*body), (0, 0, 0, 2)))
