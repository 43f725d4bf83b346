"""What the compiler made of a function: its breaks, graphs, recompilations and skipped frames."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from msgspec.structs import replace
from rich.console import RenderableType
from rich.text import Text

from shardscope.record import (
    BreakSite,
    CompiledGraph,
    Explanation,
    GraphEnd,
    OpKind,
    Recompile,
    Recording,
    SkippedFrame,
    Source,
    compress_ranks,
    format_ranks,
)
from shardscope.report.grid import Cell, Column, Grid, Look, Row, leave_out
from shardscope.report.layout import make_text, make_title, plural
from shardscope.report.units import UNKNOWN, format_duration

__all__ = [
    "describe_end",
    "fold_explanations",
    "render_explanations",
    "render_guards",
    "render_stage_times",
    "summarize_explanation",
]

_MAX_ROWS = 20
_MAX_OPS = 8  # kinds of ops named in a line
_BREAKS = {
    "line": Column("line", Look.NAME, 20),
    "count": Column("×"),
    "id": Column("id"),
    "what": Column("reason and fix", Look.PROSE, 36),
}
_GRAPHS = {
    "graph": Column("graph"),
    "function": Column("function", Look.NAME, 10),
    "line": Column("from", Look.NAME, 12),
    "ops": Column("ops"),
    "inputs": Column("in"),
    "outputs": Column("out"),
    "end": Column("ends at", Look.NAME, 18),
}
_RECOMPILES = {
    "function": Column("function", Look.NAME, 12),
    "line": Column("line", Look.NAME, 14),
    "number": Column("#"),
    "why": Column("because", Look.PROSE, 30),
}
_SKIPS = {
    "function": Column("function", Look.NAME, 12),
    "line": Column("line", Look.NAME, 14),
    "why": Column("why", Look.PROSE, 30),
}
_STAGES = {
    "stage": Column("stage", Look.NAME, 10),
    "calls": Column("calls"),
    "time": Column("time"),
}


def render_explanations(recording: Recording) -> Iterator[RenderableType]:
    """Each explanation, ranks that have the same one together; nothing if there is none."""
    for explanation, ranks in fold_explanations(recording.explanations):
        has_many = len({one.rank for one in recording.explanations}) > 1
        note = f"rank {format_ranks(compress_ranks(ranks))}" if has_many else ""
        yield make_title(_title(explanation), note)
        yield summarize_explanation(explanation)
        yield from _render_sections(explanation)


def fold_explanations(
    explanations: Sequence[Explanation],
) -> list[tuple[Explanation, list[int]]]:
    """The first of those that are the same but for times, with the ranks of all of them."""
    folded: dict[Explanation, tuple[Explanation, list[int]]] = {}
    for one in explanations:
        key = replace(one, rank=0, stages=())  # no two ranks take the same time
        folded.setdefault(key, (one, []))[1].append(one.rank)
    return [(first, sorted(set(ranks))) for first, ranks in folded.values()]


def _title(explanation: Explanation) -> str:
    name = make_text(explanation.target, width=60).plain
    return f"torch.compile summary: {name}" if name else "torch.compile summary"


def summarize_explanation(explanation: Explanation) -> Text:
    """How many graphs, breaks, recompilations and skipped functions."""
    breaks, skips = explanation.num_break_sites, explanation.num_skipped_frames
    is_whole = explanation.num_graphs == 1 and not breaks and not skips
    line = Text(plural(explanation.num_graphs, "graph"), "bold green" if is_whole else "bold")
    line.append(f" with {plural(explanation.num_ops, 'op')}", "")
    line.append(f"; {plural(breaks, 'break site')}", "bold yellow" if breaks else "")
    if breaks:
        line.append(f", {plural(explanation.num_break_events, 'break')}", "")
    line.append(f"; {plural(explanation.num_recompiles, 'recompilation')}", "")
    line.append(f"; {plural(skips, 'skipped function')}", "bold yellow" if skips else "")
    return line.append(".", "")


def _render_sections(explanation: Explanation) -> Iterator[RenderableType]:
    if explanation.break_sites:
        yield make_title("Breaks", "lines where the graph breaks")
        yield from _render_some(_BREAKS, [_break_row(one) for one in explanation.break_sites], "id")
    if explanation.graphs:
        yield make_title("Graphs", _name_ops(explanation))
        rows = [_graph_row(one, explanation) for one in explanation.graphs]
        yield from _render_some(_GRAPHS, rows, "outputs", "inputs", "line")
    if explanation.recompiles:
        yield make_title("Recompilations", "guards that failed")
        rows = [_recompile_row(one) for one in explanation.recompiles]
        yield from _render_some(_RECOMPILES, rows, "line")
    if explanation.skipped_frames:
        yield make_title("Skipped functions", "run eagerly")
        rows = [_skip_row(one, explanation) for one in explanation.skipped_frames]
        yield from _render_some(_SKIPS, rows, "line")


def _render_some(
    columns: dict[str, Column], rows: Sequence[Row], *left_out: str
) -> Iterator[RenderableType]:
    yield Grid(columns, rows[:_MAX_ROWS], leave_out(list(columns), *left_out))
    if len(rows) > _MAX_ROWS:
        more = f"… and {len(rows) - _MAX_ROWS:,} more: see shardscope export --to json"
        yield Text(more, "dim")


def _place(source: Source | None) -> str:
    return "" if source is None else f"{source.file}:{source.line}"


def _break_row(site: BreakSite) -> Row:
    what = make_text(site.reason, width=200)
    if site.source.text:
        what.append("\n").append_text(make_text(site.source.text, "dim italic", width=100))
    fix = site.fix or next(iter(site.hints), "")
    if fix:
        what.append("\n").append_text(make_text(f"→ {fix}", "green", width=300))
    row: dict[str, Cell] = {
        "line": make_text(f"{_place(site.source)} {site.source.function}"),
        "count": f"{site.num_events:,}",
        "id": site.break_id,
        "what": what,
    }
    return row


def _name_ops(explanation: Explanation) -> str:
    ops = [one for graph in explanation.graphs for one in graph.ops]
    counts = Counter(one.op for one in ops if one.kind is not OpKind.BOOKKEEPING)
    named = [f"{op} ×{count:,}" if count > 1 else op for op, count in counts.most_common(_MAX_OPS)]
    more = f", and {len(counts) - _MAX_OPS:,} more" if len(counts) > _MAX_OPS else ""
    return ", ".join(named) + more


def _graph_row(graph: CompiledGraph, explanation: Explanation) -> Row:
    again = " again" if graph.is_recompile else ""
    row: dict[str, Cell] = {
        "graph": f"{graph.index}",
        "function": make_text(f"{graph.function}{again}"),
        "line": make_text(_place(graph.source)),
        "ops": f"{graph.num_ops:,}",
        "inputs": f"{graph.num_inputs:,}",
        "outputs": f"{graph.num_outputs:,}",
        "end": make_text(describe_end(graph, explanation)),
    }
    return row


def describe_end(graph: CompiledGraph, explanation: Explanation) -> str:
    """What a graph ends with, and where."""
    if graph.end is not GraphEnd.BREAK:
        return str(graph.end)
    site = _find_site(graph.break_site, explanation)
    return "a break" if site is None else f"the break at {_place(site.source)}"


def _find_site(index: int | None, explanation: Explanation) -> BreakSite | None:
    is_known = index is not None and index < len(explanation.break_sites)
    return explanation.break_sites[index] if index is not None and is_known else None


def _recompile_row(one: Recompile) -> Row:
    row: dict[str, Cell] = {
        "function": make_text(one.function),
        "line": make_text(_place(one.source)),
        "number": f"{one.number:,}",
        "why": make_text(one.description, width=200),
    }
    return row


def _skip_row(one: SkippedFrame, explanation: Explanation) -> Row:
    site = _find_site(one.break_site, explanation)
    at = "" if site is None else f", at {_place(site.source)}"
    row: dict[str, Cell] = {
        "function": make_text(f"the rest of {one.function}" if one.is_rest else one.function),
        "line": make_text(_place(one.source)),
        "why": make_text(f"{one.reason}{at}", width=200),
    }
    return row


def render_stage_times(recording: Recording) -> Iterator[RenderableType]:
    """How long compilers took; not part of the rest, since no two runs take the same."""
    for explanation in recording.explanations:
        yield make_title("Compile time", "by stage, exclusive")
        if all(one.total_ns is None for one in explanation.stages):
            is_compiled = explanation.graphs or explanation.stages
            yield Text("Times were not recorded." if is_compiled else "Nothing was compiled.")
            continue
        rows: list[Row] = [
            {
                "stage": make_text(one.stage),
                "calls": f"{one.num_calls:,}",
                "time": UNKNOWN if one.total_ns is None else format_duration(one.total_ns),
            }
            for one in explanation.stages
        ]
        yield Grid(_STAGES, rows, [list(_STAGES)])


def render_guards(recording: Recording) -> Iterator[RenderableType]:
    """What has to hold for each compilation to be used again."""
    for explanation in recording.explanations:
        for frame in explanation.guards:
            name = make_text(frame.function, width=60).plain
            note = plural(len(frame.guards), "guard")
            yield make_title(f"Guards of {name} ({frame.compile_id})", note)
            yield from (make_text(f"  {one}", width=200) for one in frame.guards)
