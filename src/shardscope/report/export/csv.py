"""Renders every table of a recording as CSV, one row per record."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from io import StringIO
from typing import Any, NamedTuple

from msgspec.structs import astuple

from shardscope.record import (
    BreakSite,
    BucketReduce,
    Call,
    Collective,
    Compiled,
    Coverage,
    Finding,
    FullyShard,
    Gap,
    Mark,
    OpCoverage,
    OpVerdict,
    Parameter,
    RankSpan,
    Recording,
    Redistribute,
    Source,
    Span,
    SpmdCall,
    format_ranks,
)
from shardscope.record.text import sanitize_text
from shardscope.report.model.traffic_totals import sum_known
from shardscope.report.text.op_coverage import COVERED

Cell = str | int | None

# A spreadsheet evaluates a cell that starts with these as a formula.
_FORMULA_STARTS = ("=", "+", "-", "@")
_PIECE_SIZE = 4096  # rows
_CACHE_SIZE = 2**16
_PLAIN = [name for name in Collective.__struct_fields__ if name not in ("cause", "source")]


def render_csv(recording: Recording) -> str:
    """Render every field of every collective; cause and source line have columns of their own."""
    return b"".join(render_csv_chunks(recording)).decode()


def render_csv_chunks(recording: Recording) -> Iterator[bytes]:
    """Yield what `render_csv` returns, as UTF-8, some thousand rows at a time."""
    yield write_rows([[*_PLAIN, *_CAUSE_COLUMNS, *_SOURCE_COLUMNS, "is_simulated"]])
    is_simulated = str(recording.run.is_simulated).lower()
    cached = lru_cache(_CACHE_SIZE)(disarm)  # most cells repeat, many of them thousands of times
    calls = recording.collectives
    for start in range(0, len(calls), _PIECE_SIZE):
        batch = calls[start : start + _PIECE_SIZE]
        rows = ([*_make_row(call), is_simulated] for call in batch)
        yield write_rows([cached(cell) for cell in row] for row in rows)


def write_rows(rows: Iterable[list[Cell]]) -> bytes:
    """Encode rows as UTF-8."""
    output = StringIO()
    csv.writer(output, lineterminator="\n").writerows(rows)
    return output.getvalue().encode("utf-8", "backslashreplace")


def _make_row(call: Collective) -> list[Cell]:
    plain: list[Cell] = [getattr(call, name) for name in _PLAIN]
    causes = [read(call) for read in _CAUSE_COLUMNS.values()]
    return [*plain, *causes, *(read(call) for read in _SOURCE_COLUMNS.values())]


def disarm(cell: Cell) -> Cell:
    """Return the text on one line, and prevent spreadsheets from reading it as a formula."""
    if not isinstance(cell, str):
        return cell
    text = sanitize_text(cell)
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text


def _name_cause(call: Collective) -> str | None:
    return None if call.cause is None else str(call.cause.__struct_config__.tag)


def describe_cause(call: Collective) -> str | None:
    """Return the op, action, call, graph or parameters that caused the collective."""
    match call.cause:
        case Redistribute(asked_by=words) | FullyShard(action=words):
            return words
        case Call(api=words) | Compiled(graph=words) | SpmdCall(function=words):
            return words
        case BucketReduce(parameters=parameters):
            return " ".join(parameters)
    return None


def _from_redistribute(field: str) -> Callable[[Collective], Cell]:
    def read(call: Collective) -> Cell:
        if isinstance(call.cause, SpmdCall) and field != "is_implicit":
            return str(getattr(call.cause, field))
        if not isinstance(call.cause, Redistribute):
            return None
        value = getattr(call.cause, field)
        return str(value).lower() if isinstance(value, bool) else ", ".join(value)

    return read


def _from_source(field: str) -> Callable[[Collective], Cell]:
    return lambda call: None if call.source is None else getattr(call.source, field)


def _read_bucket(call: Collective) -> int | None:
    return call.cause.bucket if isinstance(call.cause, BucketReduce) else None


def _read_num_parameters(call: Collective) -> int | None:
    match call.cause:
        case FullyShard(num_parameters=number):
            return number
        case BucketReduce(parameters=parameters):
            return len(parameters)
    return None


_CAUSE_COLUMNS: dict[str, Callable[[Collective], Cell]] = {
    "cause": _name_cause,
    "cause_detail": describe_cause,
    "placements_before": _from_redistribute("before"),
    "placements_after": _from_redistribute("after"),
    "is_implicit": _from_redistribute("is_implicit"),
    "bucket": _read_bucket,
    "num_parameters": _read_num_parameters,
}
_SOURCE_COLUMNS: dict[str, Callable[[Collective], Cell]] = {
    "source_file": _from_source("file"),
    "source_line": _from_source("line"),
    "source_function": _from_source("function"),
    "source_text": _from_source("text"),
}


_COVERAGE_COLUMNS = [
    "level",
    "mesh",
    "op",
    "verdict",
    "is_covered",
    "num_forward",
    "num_backward",
    "flops",
    "moved_bytes",
    "detail",
    "remedy",
    "modules",
    "sources",
    "schema",
]


Rows = Iterator[tuple[Any, ...]]


class _Table(NamedTuple):
    columns: tuple[str, ...]
    rows: Callable[[Recording], Rows]


def render_table(recording: Recording, name: str) -> Iterator[bytes]:
    """Yield the table `name`, one of `TABLES`, as UTF-8."""
    if name == "collectives":
        yield from render_csv_chunks(recording)
    elif name == "coverage":
        yield render_coverage_csv(recording)
    else:
        table = _TABLES[name]
        yield write_rows([list(table.columns)])
        yield write_rows(
            [disarm(_make_cell(value)) for value in row] for row in table.rows(recording)
        )


def render_coverage_csv(recording: Recording) -> bytes:
    """Render a row for each op of each level, as UTF-8."""
    rows = [
        [disarm(cell) for cell in _make_coverage_row(level, op)]
        for level in recording.coverage
        for op in level.ops
    ]
    return write_rows([list(_COVERAGE_COLUMNS), *rows])


def _make_coverage_row(coverage: Coverage, op: OpCoverage) -> list[str | int | None]:
    return [
        str(coverage.level),
        ",".join(f"{axis.name}={axis.size}" for axis in coverage.axes),
        op.op,
        str(op.verdict),
        None if op.verdict is OpVerdict.LOCAL else str(op.verdict in COVERED).lower(),
        op.num_forward,
        op.num_backward,
        op.flops,
        sum(move.num_bytes for move in op.moves),
        op.detail,
        op.remedy,
        " ".join(op.modules),
        " ".join(f"{source.file}:{source.line}" for source in op.sources),
        op.schema,
    ]


def count_rows(recording: Recording, name: str) -> int:
    """Count the rows of a table."""
    if name == "collectives":
        return len(recording.collectives)
    if name == "coverage":
        return sum(len(coverage.ops) for coverage in recording.coverage)
    return sum(1 for _ in _TABLES[name].rows(recording))


def _list_modules(recording: Recording) -> Rows:
    for module in recording.modules:
        local_bytes = _add_bytes(parameter.local_bytes for parameter in module.parameters)
        global_bytes = _add_bytes(parameter.global_bytes for parameter in module.parameters)
        number = len(module.parameters)
        yield (
            module.name,
            module.type,
            module.ranks,
            module.marks,
            module.aliases,
            number,
            local_bytes,
            global_bytes,
        )


def _add_bytes(sizes: Iterable[int | None]) -> int | None:
    """Sum sizes: 0 for a module without parameters, None if any size was not recorded."""
    known = list(sizes)
    return sum_known(known) if known else 0


def _list_parameters(recording: Recording) -> Rows:
    for module in recording.modules:
        for parameter in module.parameters:
            yield module.name, module.ranks, *astuple(parameter)


def _list_memory(recording: Recording) -> Rows:
    for profile in recording.memory:
        for use in profile.at_peak:
            yield profile.rank, profile.peak_phase, use.kind, use.module, use.num_bytes


def _list_spans(recording: Recording) -> Rows:
    for span in recording.spans:
        yield *astuple(span), recording.run.is_simulated


def _list_breaks(recording: Recording) -> Rows:
    for explanation in recording.explanations:
        for site in explanation.break_sites:
            yield explanation.rank, explanation.target, *astuple(site)


def _make_cell(value: Any) -> Cell:
    """Convert a value of a record to one cell."""
    match value:
        case bool():
            return str(value).lower()
        case None | int():
            return value
        case Source():
            return f"{value.file}:{value.line}"
        case Mark():
            return " ".join(filter(None, (value.kind, value.detail, *value.axes)))
        case (RankSpan(), *_):
            return format_ranks(value)
        case tuple():
            return ", ".join(str(_make_cell(item)) for item in value)
    return str(value)


_SIZES = ("num_parameters", "local_bytes", "global_bytes")
_TABLES = {
    "modules": _Table(
        ("name", "type", "ranks", "marks", "aliases", *_SIZES),
        _list_modules,
    ),
    "parameters": _Table(("module", "ranks", *Parameter.__struct_fields__), _list_parameters),
    "memory": _Table(("rank", "peak_phase", "kind", "module", "num_bytes"), _list_memory),
    "spans": _Table((*Span.__struct_fields__, "is_simulated"), _list_spans),
    "breaks": _Table(("rank", "target", *BreakSite.__struct_fields__), _list_breaks),
    "findings": _Table(
        Finding.__struct_fields__, lambda recording: map(astuple, recording.findings)
    ),
    "gaps": _Table(Gap.__struct_fields__, lambda recording: map(astuple, recording.gaps)),
}
TABLES = ("collectives", "coverage", *_TABLES)
