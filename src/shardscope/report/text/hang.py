"""A hang: its likely causes, who waits for whom, how far each group has come, what is not known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from shardscope.record import Recording, format_ranks
from shardscope.record.base import name_line
from shardscope.record.hang_records import (
    CauseKind,
    GroupProgress,
    HangAnalysis,
    HangCall,
    HangCause,
    HangSource,
    HangWait,
)
from shardscope.record.units import format_bytes, format_duration, plural
from shardscope.report.text.style import make_text, make_title
from shardscope.report.text.table import Column, ColumnStyle, Grid, Row, narrower_layouts

_MAX_ROWS = 24
_NAME, _PROSE = ColumnStyle.NAME, ColumnStyle.PROSE

CAUSE_NAMES = {
    CauseKind.MISMATCH: "different arguments",
    CauseKind.DIFFERENT_CALL: "a different call",
    CauseKind.SKIPPED_CALL: "a skipped call",
    CauseKind.WRONG_ORDER: "another order of calls",
    CauseKind.UNMATCHED_TRANSFER: "an unmatched send or receive",
    CauseKind.OUT_OF_MEMORY: "out of memory",
    CauseKind.CRASH: "a rank that ended",
    CauseKind.STOPPED: "a process that does not run",
    CauseKind.LOST: "a rank that left nothing",
    CauseKind.DATA_LOADING: "the data loader",
    CauseKind.FILE_SYSTEM: "file input and output",
    CauseKind.COMPILING: "a compilation",
    CauseKind.DIFFERENT_COMPILE: "different compiled graphs",
    CauseKind.SLOW: "a rank that is not there yet",
    CauseKind.NETWORK: "the network or a device",
    CauseKind.UNKNOWN: "not known",
}
"""What a class of cause is called in views."""

_CAUSES = {
    "cause": Column("likely cause", _NAME, 16),
    "certainty": Column("", _NAME, 8),
    "ranks": Column("ranks", _NAME, 6),
    "group": Column("group", _NAME, 8),
    "position": Column("position"),
    "line": Column("line", _NAME, 12),
}
_WAITS = {
    "waiters": Column("ranks", _NAME, 6),
    "missing": Column("wait for", _NAME, 8),
    "call": Column("in", _NAME, 14),
    "group": Column("group", _NAME, 8),
    "position": Column("position"),
    "line": Column("line", _NAME, 12),
}
_PROGRESS = {
    "group": Column("group", _NAME, 8),
    "ranks": Column("ranks", _NAME, 6),
    "issued": Column("issued"),
    "done": Column("done"),
    "behind": Column("behind"),
    "last": Column("last call", _NAME, 14),
    "line": Column("line", _NAME, 12),
    "now": Column("stack", _NAME, 14),
}
_SOURCES = {
    "pattern": Column("file", _NAME, 12),
    "format": Column("format", _NAME, 8),
    "ranks": Column("ranks", _NAME, 6),
    "calls": Column("calls"),
    "detail": Column("", _PROSE, 16),
}
_STATES = {
    "ranks": Column("ranks", _NAME, 6),
    "activity": Column("stack", _PROSE, 16),
    "detail": Column("log", _PROSE, 16),
}
_SKEWS = {
    "group": Column("group", _NAME, 8),
    "count": Column("collectives"),
    "skew": Column("waiting"),
    "transfer": Column("transfer"),
    "last": Column("last to arrive", _NAME, 10),
}


def render_hangs(recording: Recording) -> Iterator[RenderableType]:
    """Render each analysis of a hang; nothing if there are none."""
    for hang in recording.hangs:
        yield from _render_causes(hang)
        yield from _render_waits(hang)
        yield from _render_divergences(hang)
        yield from _render_progress(hang)
        yield from _render_states(hang)
        yield from _render_skews(hang)
        yield from _render_sources(hang)
        yield from _render_unknowns(hang)


def summarize_hang(hang: HangAnalysis) -> str:
    """What an analysis found, in a sentence."""
    if hang.causes:
        cause = hang.causes[0]
        ranks = format_ranks(cause.ranks)
        where = f" in group {cause.group}" if cause.group is not None else ""
        on_ranks = f" on rank{'s' if ',' in ranks or '-' in ranks else ''} {ranks}" if ranks else ""
        return f"It hangs: {CAUSE_NAMES[cause.kind]}{on_ranks}{where} ({cause.certainty})."
    if hang.slow_ranks:
        slow = hang.slow_ranks[0]
        return (
            f"No rank waits. The others waited for rank {slow.rank} in all "
            f"{format_duration(slow.excess_ns)}."
        )
    if hang.is_hang:
        return "Ranks wait, and the files do not say for what."
    return "No rank waits for another in these files."


def describe_hang_call(call: HangCall | None) -> str:
    """`all_reduce 4.00 MiB`, `send 1.00 MiB peer 3`; empty if not known."""
    if call is None:
        return ""
    words = [str(call.kind) if call.kind is not None else call.op]
    if call.num_bytes is not None:
        words.append(format_bytes(call.num_bytes))
    if call.peer is not None:
        words.append(f"peer {call.peer}")
    return " ".join(filter(None, words))


def _render_causes(hang: HangAnalysis) -> Iterator[RenderableType]:
    yield make_title("Hang" if hang.is_hang else "No hang")
    yield make_text(summarize_hang(hang), "bold")
    if not hang.causes:
        return
    yield Text("")
    rows = [_make_cause(cause) for cause in hang.causes]
    yield _make_grid(_CAUSES, rows, "line", "position")
    for number, cause in enumerate(hang.causes[:1]):
        for item in cause.evidence:
            yield Padding(make_text(f"– {item}", "" if number else "dim"), (0, 0, 0, 2))


def _make_cause(cause: HangCause) -> Row:
    return {
        "cause": make_text(CAUSE_NAMES[cause.kind]),
        "certainty": make_text(str(cause.certainty)),
        "ranks": make_text(format_ranks(cause.ranks)),
        "group": make_text(cause.group or ""),
        "position": "" if cause.position is None else f"{cause.position:,}",
        "line": make_text(name_line(cause.source)),
    }


def _render_waits(hang: HangAnalysis) -> Iterator[RenderableType]:
    if not hang.waits:
        return
    note = ""
    if hang.cycle:
        ring = [*hang.cycle, hang.cycle[0]]
        note = "a cycle: " + " → ".join(map(str, ring[:9])) + (" …" if len(ring) > 9 else "")
    yield make_title("Who waits for whom", note)
    yield _make_grid(_WAITS, [_make_wait(wait) for wait in hang.waits], "line", "position")


def _make_wait(wait: HangWait) -> Row:
    return {
        "waiters": make_text(format_ranks(wait.waiters)),
        "missing": make_text(format_ranks(wait.missing)),
        "call": make_text(describe_hang_call(wait.call)),
        "group": make_text(wait.group),
        "position": "" if wait.position is None else f"{wait.position:,}",
        "line": make_text(name_line(wait.call.source)),
    }


def _render_divergences(hang: HangAnalysis) -> Iterator[RenderableType]:
    if not hang.divergences:
        return
    yield make_title("Where ranks diverge", "the first position of each group")
    rows: list[Row] = []
    for divergence in hang.divergences:
        for side in divergence.sides:
            call = side.call
            reduction = f" {call.reduce_op}" if call is not None and call.reduce_op else ""
            dtype = f" {call.dtype}" if call is not None else ""
            rows.append(
                {
                    "group": make_text(divergence.group),
                    "position": "" if divergence.position is None else f"{divergence.position:,}",
                    "differing": make_text(", ".join(divergence.differing)),
                    "ranks": make_text(format_ranks(side.ranks)),
                    "call": make_text(
                        f"{describe_hang_call(call)}{dtype}{reduction}" if call else "nothing"
                    ),
                    "line": make_text(name_line(call.source) if call else ""),
                }
            )
    columns = {
        "group": Column("group", _NAME, 8),
        "position": Column("position"),
        "differing": Column("differing", _NAME, 6),
        "ranks": Column("ranks", _NAME, 6),
        "call": Column("issued", _NAME, 14),
        "line": Column("line", _NAME, 12),
    }
    yield _make_grid(columns, rows, "line", "differing")


def _render_progress(hang: HangAnalysis) -> Iterator[RenderableType]:
    if not hang.progress:
        return
    level = plural(hang.num_level_groups, "more group")
    note = f"collectives of each group; {level} whose ranks are level" * bool(hang.num_level_groups)
    yield make_title("How far the ranks have come", note or "collectives of each group")
    rows = [_make_progress(row) for row in hang.progress]
    yield _make_grid(_PROGRESS, rows, "line", "done", "now")


def _make_progress(row: GroupProgress) -> Row:
    return {
        "group": make_text(row.group),
        "ranks": make_text(format_ranks(row.ranks)),
        "issued": f"{row.num_issued:,}",
        "done": "–" if row.num_done is None else f"{row.num_done:,}",
        "behind": f"{row.behind:,}" if row.behind else "",
        "last": make_text(describe_hang_call(row.last)),
        "line": make_text(name_line(row.last.source) if row.last is not None else ""),
        "now": make_text(row.now),
    }


def _render_states(hang: HangAnalysis) -> Iterator[RenderableType]:
    if not hang.states:
        return
    yield make_title("What the ranks do", "by their stacks and logs")
    rows: list[Row] = [
        {
            "ranks": make_text(format_ranks(state.ranks)),
            "activity": make_text(state.activity),
            "detail": make_text(state.detail),
        }
        for state in hang.states
    ]
    yield _make_grid(_STATES, rows)


def _render_skews(hang: HangAnalysis) -> Iterator[RenderableType]:
    if not hang.skews:
        return
    note = "means of a collective: until the last rank arrives, and from then to the end"
    yield make_title("Waiting and transfer", note)
    rows: list[Row] = [
        {
            "group": make_text(skew.group),
            "count": f"{skew.num_collectives:,}",
            "skew": format_duration(skew.skew_ns),
            "transfer": "–" if skew.transfer_ns is None else format_duration(skew.transfer_ns),
            "last": make_text(f"rank {skew.last_rank} ({skew.num_last:,}×)"),
        }
        for skew in hang.skews
    ]
    yield _make_grid(_SKEWS, rows)


def _render_sources(hang: HangAnalysis) -> Iterator[RenderableType]:
    if not hang.sources:
        return
    yield make_title("Files", f"{plural(sum(source.num_files for source in hang.sources), 'file')}")
    yield _make_grid(_SOURCES, [_make_source(source) for source in hang.sources], "calls")


def _make_source(source: HangSource) -> Row:
    count = f" ({source.num_files:,})" if source.num_files > 1 else ""
    return {
        "pattern": make_text(f"{source.pattern}{count}"),
        "format": make_text(source.format),
        "ranks": make_text(format_ranks(source.ranks)),
        "calls": "" if source.num_calls is None else f"{source.num_calls:,}",
        "detail": make_text(source.detail),
    }


def _render_unknowns(hang: HangAnalysis) -> Iterator[RenderableType]:
    if not hang.unknowns:
        return
    yield make_title("Not known", "what these files cannot say")
    for sentence in hang.unknowns:
        yield make_text(sentence)


def _make_grid(columns: dict[str, Column], rows: Sequence[Row], *dropped: str) -> Grid:
    num_hidden = len(rows) - _MAX_ROWS
    return Grid(
        columns,
        rows[:_MAX_ROWS],
        narrower_layouts(list(columns), *dropped),
        note=f"… {num_hidden:,} more rows" if num_hidden > 0 else "",
    )
