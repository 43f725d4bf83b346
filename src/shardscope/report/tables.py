"""Every table of a recording as CSV, one row for each record; collectives are `table.py`'s."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from msgspec.structs import astuple

from shardscope.record import (
    BreakSite,
    Coverage,
    Finding,
    Gap,
    Mark,
    OpCoverage,
    Parameter,
    RankSpan,
    Recording,
    Source,
    Span,
    Verdict,
    format_ranks,
)
from shardscope.report.coverage import COVERED
from shardscope.report.table import Cell, disarm, render_csv_pieces, write_rows
from shardscope.report.units import sum_known

__all__ = ["TABLES", "count_rows", "render_coverage_csv", "render_table"]

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
    """The table as UTF-8; `name` is one of `TABLES`."""
    if name == "collectives":
        yield from render_csv_pieces(recording)
    elif name == "coverage":
        yield render_coverage_csv(recording)
    else:
        table = _TABLES[name]
        yield write_rows([list(table.columns)])
        yield write_rows([disarm(_make_cell(one)) for one in row] for row in table.rows(recording))


def render_coverage_csv(recording: Recording) -> bytes:
    """A row for each op of each level, as UTF-8."""
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
        None if op.verdict is Verdict.LOCAL else str(op.verdict in COVERED).lower(),
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
    """How many rows the table has."""
    if name == "collectives":
        return len(recording.collectives)
    if name == "coverage":
        return sum(len(one.ops) for one in recording.coverage)
    return sum(1 for _ in _TABLES[name].rows(recording))


def _list_modules(recording: Recording) -> Rows:
    for one in recording.modules:
        held = _add_bytes(parameter.local_bytes for parameter in one.parameters)
        whole = _add_bytes(parameter.global_bytes for parameter in one.parameters)
        number = len(one.parameters)
        yield one.name, one.type, one.ranks, one.marks, one.aliases, number, held, whole


def _add_bytes(sizes: Iterable[int | None]) -> int | None:
    """Of a module without parameters none; None where any was not recorded."""
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
    for told in recording.explanations:
        for site in told.break_sites:
            yield told.rank, told.target, *astuple(site)


def _make_cell(value: Any) -> Cell:
    """A value of a record in one cell."""
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
            return ", ".join(str(_make_cell(one)) for one in value)
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
