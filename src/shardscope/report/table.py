"""A recording as a flat table, one row per collective, for spreadsheets and data frames."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from io import StringIO

from shardscope.record import (
    BucketReduce,
    Call,
    Collective,
    Compiled,
    FullyShard,
    Recording,
    Redistribute,
)
from shardscope.report.names import make_inert

__all__ = ["Cell", "describe_cause", "disarm", "render_csv", "render_csv_pieces", "write_rows"]

Cell = str | int | None

# A spreadsheet runs a cell that starts like this as a formula.
_FORMULA_STARTS = ("=", "+", "-", "@")
_PIECE_SIZE = 4096  # rows
_CACHE_SIZE = 2**16
_PLAIN = [name for name in Collective.__struct_fields__ if name not in ("cause", "source")]


def render_csv(recording: Recording) -> str:
    """Every field of every collective; the cause and the source line have columns of their own."""
    return b"".join(render_csv_pieces(recording)).decode()


def render_csv_pieces(recording: Recording) -> Iterator[bytes]:
    """The same as UTF-8, some thousand rows at a time."""
    yield write_rows([[*_PLAIN, *_CAUSE_COLUMNS, *_SOURCE_COLUMNS, "is_simulated"]])
    is_simulated = str(recording.run.is_simulated).lower()
    cached = lru_cache(_CACHE_SIZE)(disarm)  # most cells repeat, many of them thousands of times
    calls = recording.collectives
    for start in range(0, len(calls), _PIECE_SIZE):
        batch = calls[start : start + _PIECE_SIZE]
        rows = ([*_make_row(call), is_simulated] for call in batch)
        yield write_rows([cached(cell) for cell in row] for row in rows)


def write_rows(rows: Iterable[list[Cell]]) -> bytes:
    """Rows as UTF-8."""
    output = StringIO()
    csv.writer(output, lineterminator="\n").writerows(rows)
    return output.getvalue().encode("utf-8", "backslashreplace")


def _make_row(call: Collective) -> list[Cell]:
    plain: list[Cell] = [getattr(call, name) for name in _PLAIN]
    causes = [read(call) for read in _CAUSE_COLUMNS.values()]
    return [*plain, *causes, *(read(call) for read in _SOURCE_COLUMNS.values())]


def disarm(cell: Cell) -> Cell:
    """Text on one line that is no formula; the JSON has it as it was."""
    if not isinstance(cell, str):
        return cell
    text = make_inert(cell)
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text


def _name_cause(call: Collective) -> str | None:
    return None if call.cause is None else str(call.cause.__struct_config__.tag)


def describe_cause(call: Collective) -> str | None:
    """The op, action, call, graph or parameters behind it."""
    match call.cause:
        case Redistribute(asked_by=words) | FullyShard(action=words):
            return words
        case Call(api=words) | Compiled(graph=words):
            return words
        case BucketReduce(parameters=parameters):
            return " ".join(parameters)
    return None


def _from_redistribute(field: str) -> Callable[[Collective], Cell]:
    def read(call: Collective) -> Cell:
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
