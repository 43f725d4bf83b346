"""Which ops shard, and what blocks sharding first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from shardscope.record import Coverage, OpCoverage, Recording, Verdict
from shardscope.report.grid import Cell, Column, Grid, Look, Row, leave_out
from shardscope.report.layout import format_share, make_text, make_title, plural
from shardscope.report.lines import SourceLine
from shardscope.report.units import UNKNOWN, format_bytes, format_count, format_flops

__all__ = ["COVERED", "render_coverage", "summarize_level"]

_MAX_BLOCKERS = 5
COVERED = (Verdict.SHARDED, Verdict.DECOMPOSED, Verdict.REDISTRIBUTED)
_STYLES = {
    Verdict.LOCAL: "dim",
    Verdict.SHARDED: "green",
    Verdict.DECOMPOSED: "green",
    Verdict.REDISTRIBUTED: "yellow",
    Verdict.REPLICATED: "yellow",
    Verdict.MISSING: "bold red",
    Verdict.WRONG: "bold red",
}
_COLUMNS = {
    "op": Column("op", Look.NAME, 28),
    "verdict": Column("verdict", Look.NAME, 13),
    "forward": Column("forward"),
    "backward": Column("backward"),
    "flops": Column("FLOPs"),
    "sends": Column("sends"),
    "where": Column("first of its modules", Look.NAME, 12),
}


def render_coverage(recording: Recording) -> Iterator[RenderableType]:
    """Every level in a line, the first with all its ops; nothing if there is no coverage."""
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
    has_many = len({one.rank for one in recording.coverage}) > 1
    rank = f", rank {coverage.rank}" if has_many else ""
    return f"Op coverage ({coverage.level}{rank})"


def _note(coverage: Coverage, recording: Recording) -> str:
    mesh = " × ".join(f"{axis.name}={axis.size:,}" for axis in coverage.axes)
    how = "at the model's placements" if coverage.has_plan else "each dim of each input in turn"
    return f"on {mesh}, {how}{', simulated' if recording.run.is_simulated else ''}"


def summarize_level(coverage: Coverage) -> Text:
    """How many of its calls, FLOPs and ops shard, of those that could; and how many are local."""
    covered = [one for one in coverage.ops if one.verdict in COVERED]
    judged = [one for one in coverage.ops if one.verdict is not Verdict.LOCAL]
    local = [one for one in coverage.ops if one.verdict is Verdict.LOCAL]
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
    return sum(one.num_forward + one.num_backward for one in ops)


def _add_flops(ops: Sequence[OpCoverage]) -> int | None:
    """Of the ops that torch has a formula for; None where it has none for any."""
    known = [one.flops for one in ops if one.flops is not None]
    return sum(known) if known else None


def _render_ops(coverage: Coverage) -> RenderableType:
    if not coverage.ops:
        return Text("The model called no ops.")
    layouts = leave_out(list(_COLUMNS), "where", "sends", "backward")
    return Grid(_COLUMNS, [_make_row(one) for one in coverage.ops], layouts)


def _make_row(one: OpCoverage) -> Row:
    moved = max((move.num_bytes for move in one.moves), default=0)
    row: dict[str, Cell] = {
        "op": make_text(one.op),
        "verdict": make_text(one.verdict, _STYLES[one.verdict]),
        "forward": format_count(one.num_forward),
        "backward": format_count(one.num_backward),
        "flops": UNKNOWN if one.flops is None else format_flops(one.flops) if one.flops else "·",
        "sends": format_bytes(moved) if moved else "",
        "where": make_text(_name_modules(one)),
    }
    return row


def _name_modules(one: OpCoverage) -> str:
    if not one.modules:
        return ""
    first = one.modules[0] or "the root"
    return first if len(one.modules) == 1 else f"{first} + {len(one.modules) - 1:,}"


def _render_blockers(coverage: Coverage) -> Iterator[RenderableType]:
    """Ops that do not shard, those that compute most first."""
    blockers = [one for one in coverage.ops if one.verdict not in (*COVERED, Verdict.LOCAL)]
    if not blockers:
        return
    blockers.sort(key=lambda one: (-(one.flops or 0), -one.num_forward - one.num_backward, one.op))
    yield make_title("What blocks sharding first", "by FLOPs, then by calls")
    yield from (_render_blocker(one) for one in blockers[:_MAX_BLOCKERS])
    if len(blockers) > _MAX_BLOCKERS:
        yield Text(f"… and {len(blockers) - _MAX_BLOCKERS:,} more, in the table above", "dim")


def _render_blocker(one: OpCoverage) -> RenderableType:
    head = make_text(one.verdict, _STYLES[one.verdict]).append(" ")
    head.append_text(make_text(one.op, "bold", width=80)).append("  ")
    head.append_text(make_text(_name_modules(one), width=80))
    body: list[RenderableType] = []
    if one.detail:
        body.append(make_text(one.detail, width=300))
    if one.sources:
        body.append(SourceLine(one.sources[0]))
    if one.remedy:
        body += [make_text(line, "green", width=200) for line in f"→ {one.remedy}".splitlines()]
    return Group(head, Padding(Group(*body), (0, 0, 0, 2)))
