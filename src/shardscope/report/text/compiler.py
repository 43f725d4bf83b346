"""Graphs and breaks of compiled functions, and diagnoses of wrong results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from msgspec.structs import replace
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from shardscope.record import (
    BreakSite,
    CompiledGraph,
    Condition,
    Deviation,
    Diagnosis,
    Explanation,
    GraphEnd,
    OpKind,
    Recompile,
    Recording,
    SkippedFrame,
    SuspectOp,
    compress_ranks,
    format_ranks,
)
from shardscope.record.base import name_line
from shardscope.record.text import sanitize_text
from shardscope.record.units import UNKNOWN, format_duration, plural
from shardscope.report.text.style import format_source, make_text, make_title, shorten
from shardscope.report.text.table import Cell, Column, ColumnStyle, Grid, Row, narrower_layouts

_MAX_ROWS = 20
_MAX_OPS = 8  # kinds of ops named in a line
_BREAKS = {
    "line": Column("line", ColumnStyle.NAME, 20),
    "count": Column("×"),
    "id": Column("id"),
    "what": Column("reason and fix", ColumnStyle.PROSE, 36),
}
_GRAPHS = {
    "graph": Column("graph"),
    "function": Column("function", ColumnStyle.NAME, 10),
    "line": Column("from", ColumnStyle.NAME, 12),
    "ops": Column("ops"),
    "inputs": Column("in"),
    "outputs": Column("out"),
    "end": Column("ends at", ColumnStyle.NAME, 18),
}
_RECOMPILES = {
    "function": Column("function", ColumnStyle.NAME, 12),
    "line": Column("line", ColumnStyle.NAME, 14),
    "number": Column("#"),
    "why": Column("because", ColumnStyle.PROSE, 30),
}
_SKIPS = {
    "function": Column("function", ColumnStyle.NAME, 12),
    "line": Column("line", ColumnStyle.NAME, 14),
    "why": Column("why", ColumnStyle.PROSE, 30),
}
_STAGES = {
    "stage": Column("stage", ColumnStyle.NAME, 10),
    "calls": Column("calls"),
    "time": Column("time"),
}


def render_explanations(recording: Recording) -> Iterator[RenderableType]:
    """Render each explanation; ranks with equal ones share it. Nothing if there are none."""
    for explanation, ranks in fold_explanations(recording.explanations):
        has_many = len({explanation.rank for explanation in recording.explanations}) > 1
        note = f"rank {format_ranks(compress_ranks(ranks))}" if has_many else ""
        yield make_title(_title(explanation), note)
        yield summarize_explanation(explanation)
        yield from _render_sections(explanation)


def fold_explanations(
    explanations: Sequence[Explanation],
) -> list[tuple[Explanation, list[int]]]:
    """Group explanations that are equal except for times, each with its ranks."""
    folded: dict[Explanation, tuple[Explanation, list[int]]] = {}
    for explanation in explanations:
        key = replace(explanation, rank=0, stages=())  # times differ between ranks
        folded.setdefault(key, (explanation, []))[1].append(explanation.rank)
    return [(first, sorted(set(ranks))) for first, ranks in folded.values()]


def _title(explanation: Explanation) -> str:
    name = make_text(explanation.target, width=60).plain
    return f"torch.compile summary: {name}" if name else "torch.compile summary"


def summarize_explanation(explanation: Explanation) -> Text:
    """Count graphs, breaks, recompilations and skipped functions."""
    breaks, skips = explanation.num_break_sites, explanation.num_skipped_frames
    is_single_graph = explanation.num_graphs == 1 and not breaks and not skips
    line = Text(
        plural(explanation.num_graphs, "graph"), "bold green" if is_single_graph else "bold"
    )
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
        yield from _render_first_rows(
            _BREAKS, [_break_row(site) for site in explanation.break_sites], "id"
        )
    if explanation.graphs:
        yield make_title("Graphs", _name_ops(explanation))
        rows = [_graph_row(graph, explanation) for graph in explanation.graphs]
        yield from _render_first_rows(_GRAPHS, rows, "outputs", "inputs", "line")
    if explanation.recompiles:
        yield make_title("Recompilations", "guards that failed")
        rows = [_recompile_row(recompile) for recompile in explanation.recompiles]
        yield from _render_first_rows(_RECOMPILES, rows, "line")
    if explanation.skipped_frames:
        yield make_title("Skipped functions", "run eagerly")
        rows = [_skip_row(frame, explanation) for frame in explanation.skipped_frames]
        yield from _render_first_rows(_SKIPS, rows, "line")


def _render_first_rows(
    columns: dict[str, Column], rows: Sequence[Row], *left_out: str
) -> Iterator[RenderableType]:
    yield Grid(columns, rows[:_MAX_ROWS], narrower_layouts(list(columns), *left_out))
    if len(rows) > _MAX_ROWS:
        more = f"… and {len(rows) - _MAX_ROWS:,} more: see shardscope export --to json"
        yield Text(more, "dim")


def _break_row(site: BreakSite) -> Row:
    label = make_text(site.reason, width=200)
    if site.source.text:
        label.append("\n").append_text(make_text(site.source.text, "dim italic", width=100))
    fix = site.fix or next(iter(site.hints), "")
    if fix:
        label.append("\n").append_text(make_text(f"→ {fix}", "green", width=300))
    row: dict[str, Cell] = {
        "line": make_text(f"{name_line(site.source)} {site.source.function}"),
        "count": f"{site.num_events:,}",
        "id": site.break_id,
        "what": label,
    }
    return row


def _name_ops(explanation: Explanation) -> str:
    ops = [op for graph in explanation.graphs for op in graph.ops]
    counts = Counter(op.op for op in ops if op.kind is not OpKind.BOOKKEEPING)
    named = [f"{op} ×{count:,}" if count > 1 else op for op, count in counts.most_common(_MAX_OPS)]
    more = f", and {len(counts) - _MAX_OPS:,} more" if len(counts) > _MAX_OPS else ""
    return ", ".join(named) + more


def _graph_row(graph: CompiledGraph, explanation: Explanation) -> Row:
    again = " again" if graph.is_recompile else ""
    row: dict[str, Cell] = {
        "graph": f"{graph.index}",
        "function": make_text(f"{graph.function}{again}"),
        "line": make_text(name_line(graph.source)),
        "ops": f"{graph.num_ops:,}",
        "inputs": f"{graph.num_inputs:,}",
        "outputs": f"{graph.num_outputs:,}",
        "end": make_text(describe_end(graph, explanation)),
    }
    return row


def describe_end(graph: CompiledGraph, explanation: Explanation) -> str:
    """Describe how a graph ends, and where."""
    if graph.end is not GraphEnd.BREAK:
        return str(graph.end)
    site = _find_site(graph.break_site, explanation)
    return "a break" if site is None else f"the break at {name_line(site.source)}"


def _find_site(index: int | None, explanation: Explanation) -> BreakSite | None:
    is_known = index is not None and index < len(explanation.break_sites)
    return explanation.break_sites[index] if index is not None and is_known else None


def _recompile_row(recompile: Recompile) -> Row:
    row: dict[str, Cell] = {
        "function": make_text(recompile.function),
        "line": make_text(name_line(recompile.source)),
        "number": f"{recompile.number:,}",
        "why": make_text(recompile.description, width=200),
    }
    return row


def _skip_row(frame: SkippedFrame, explanation: Explanation) -> Row:
    site = _find_site(frame.break_site, explanation)
    at = "" if site is None else f", at {name_line(site.source)}"
    row: dict[str, Cell] = {
        "function": make_text(f"the rest of {frame.function}" if frame.is_rest else frame.function),
        "line": make_text(name_line(frame.source)),
        "why": make_text(f"{frame.reason}{at}", width=200),
    }
    return row


def render_stage_times(recording: Recording) -> Iterator[RenderableType]:
    """Render compile times; not in the summary, as times differ between runs."""
    for explanation in recording.explanations:
        yield make_title("Compile time", "by stage, exclusive")
        if all(stage.total_ns is None for stage in explanation.stages):
            is_compiled = explanation.graphs or explanation.stages
            yield Text("Times were not recorded." if is_compiled else "Nothing was compiled.")
            continue
        rows: list[Row] = [
            {
                "stage": make_text(stage.stage),
                "calls": f"{stage.num_calls:,}",
                "time": UNKNOWN if stage.total_ns is None else format_duration(stage.total_ns),
            }
            for stage in explanation.stages
        ]
        yield Grid(_STAGES, rows, [list(_STAGES)])


def render_guards(recording: Recording) -> Iterator[RenderableType]:
    """Render the guards of each compiled frame."""
    for explanation in recording.explanations:
        for frame in explanation.guards:
            name = make_text(frame.function, width=60).plain
            note = plural(len(frame.guards), "guard")
            yield make_title(f"Guards of {name} ({frame.compile_id})", note)
            yield from (make_text(f"  {guard}", width=200) for guard in frame.guards)


_GOOD = "bold green"
_BAD = "bold red"
_MAX_SUSPECTS = 8
_NAME_WIDTH = 60
_LINE_WIDTH = 120
_TEXT_WIDTH = 600
_MANY_ULP = 1e5  # more than rounding explains
_WORDS = {
    Condition.RNG: "different random numbers",
    Condition.NAN: "NaN or infinity",
}


def render_diagnoses(recording: Recording) -> Iterator[RenderableType]:
    """Render a block of lines for each diagnosis; nothing if there are none."""
    for diagnosis in recording.diagnoses:
        names = (
            shorten(sanitize_text(name), _NAME_WIDTH)
            for name in (diagnosis.target, diagnosis.backend)
        )
        yield make_title("Diagnosis", "of {} compiled by {}".format(*names))
        yield _render(diagnosis)


def _render(diagnosis: Diagnosis) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _lines(diagnosis):
        table.add_row(name, text)
    return table


def _add_colon(fact: str) -> str:
    return f": {fact}" if fact else ""


def _lines(diagnosis: Diagnosis) -> Iterator[tuple[str, Text]]:
    style = _BAD if diagnosis.condition.is_bad else _GOOD
    words = name_condition(diagnosis.condition)
    yield (
        "verdict",
        Text(words, style).append_text(make_text(_add_colon(diagnosis.fact), width=_TEXT_WIDTH)),
    )
    if diagnosis.stage is not None:
        yield "stage", _name_stage(diagnosis)
    if diagnosis.graph is not None:
        yield "where", make_text(describe_location(diagnosis))
    yield from _render_suspects(diagnosis)
    if deviation := describe_deviation(diagnosis.deviation):
        yield "off by", make_text(deviation)
    yield from _render_error(diagnosis)
    if diagnosis.repro:
        yield "repro", _describe_repro(diagnosis)
    if diagnosis.passing:
        yield "passes", make_text(diagnosis.passing)
    yield "tried", make_text(plural(diagnosis.num_queries, "compilation"))
    for note in diagnosis.notes:
        yield "note", make_text(note, width=_TEXT_WIDTH)


def _name_stage(diagnosis: Diagnosis) -> Text:
    """Format stage and part, `backend: aten.relu.default`; a part may name the stage itself."""
    is_named = diagnosis.part.startswith(str(diagnosis.stage))
    stage = make_text(
        diagnosis.part if is_named else str(diagnosis.stage), "bold", width=_TEXT_WIDTH
    )
    rest = "" if is_named or not diagnosis.part else f": {diagnosis.part}"
    return stage.append_text(make_text(rest, width=_TEXT_WIDTH))


def name_condition(condition: Condition) -> str:
    """Name a condition in words."""
    return _WORDS.get(condition, condition.replace("_", " "))


def describe_location(diagnosis: Diagnosis) -> str:
    """Describe the failing graph and phase."""
    phase = f", {diagnosis.phase}" if diagnosis.phase is not None else ""
    graph = (
        f"graph {diagnosis.graph} of 0 – {diagnosis.num_graphs - 1}"
        if diagnosis.num_graphs > 1
        else "its only graph"
    )
    return f"{graph}{phase}"


def _render_suspects(diagnosis: Diagnosis) -> Iterator[tuple[str, Text]]:
    for index, suspect in enumerate(diagnosis.suspects[:_MAX_SUSPECTS]):
        name = "" if index else "op" if len(diagnosis.suspects) == 1 else "ops"
        yield name, _describe_suspect(suspect)
    if len(diagnosis.suspects) > _MAX_SUSPECTS:
        yield "", Text(f"… and {len(diagnosis.suspects) - _MAX_SUSPECTS:,} more", "dim")
    if diagnosis.suspects and not diagnosis.is_minimal:
        yield "", Text("a smaller program may fail as well: the search was not finished", "yellow")


def _describe_suspect(suspect: SuspectOp) -> Text:
    text = make_text(suspect.op, "bold", width=_NAME_WIDTH)
    if suspect.module:
        text.append_text(make_text(f"  in {suspect.module}", width=_NAME_WIDTH))
    if suspect.source is not None:
        text.append("  ").append_text(format_source(suspect.source, width=_LINE_WIDTH))
    return text


def describe_deviation(deviation: Deviation | None) -> str:
    """Describe how much values deviate; nothing where units in the last place mean nothing."""
    if deviation is None or not 0 < deviation.max_ulp < _MANY_ULP:
        return ""
    count = f"{deviation.max_ulp:,.0f}"
    return (
        f"up to {count} unit{'' if count == '1' else 's'} in the last place of {deviation.tensor}"
    )


def _render_error(diagnosis: Diagnosis) -> Iterator[tuple[str, Text]]:
    """Render the raised error, unless the verdict has it already."""
    line = diagnosis.error.strip().partition("\n")[0]
    if line and line.rstrip(".") not in diagnosis.fact:
        yield "error", make_text(line, width=_TEXT_WIDTH)


def _describe_repro(diagnosis: Diagnosis) -> Text:
    proof = "a fresh process fails in the same way" if diagnosis.is_verified else "not verified"
    return make_text(diagnosis.repro).append(f"  ({proof})", "dim")
