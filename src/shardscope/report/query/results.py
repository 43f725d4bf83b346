"""The result of a query as a table for the terminal, CSV, JSON, Markdown or Arrow, and the list of
all tables.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

from rich.table import Table as TextTable

from shardscope.record.arrow import import_package
from shardscope.record.encoding import encode_json
from shardscope.record.tables import Table, make_tables
from shardscope.record.text import sanitize_text
from shardscope.report.export.csv import disarm, write_rows

MAX_ROWS = 1_000  # that are printed as text
_PIECE_SIZE = 4096  # rows


def render_text(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> TextTable:
    """Render the first rows as a table; numbers are aligned to the right."""
    table = TextTable(box=None, pad_edge=False, header_style="bold")
    for position, name in enumerate(names):
        values = (row[position] for row in rows[:MAX_ROWS])
        is_number = all(isinstance(value, int | float | None) for value in values)
        table.add_column(sanitize_text(name), justify="right" if is_number else "left")
    for row in rows[:MAX_ROWS]:
        table.add_row(*map(_write_cell, row))
    return table


def render_markdown_rows(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[bytes]:
    """Render a Markdown table."""
    yield _write_markdown_row(names)
    yield b"|" + b"---|" * len(names) + b"\n"
    for row in rows:
        yield _write_markdown_row(list(map(_write_cell, row)))


def _write_markdown_row(cells: Sequence[str]) -> bytes:
    escaped = (sanitize_text(cell).replace("\\", "\\\\").replace("|", "\\|") for cell in cells)
    text = "".join(f" {cell.replace('<', '&lt;')} |" for cell in escaped)
    return f"|{text}\n".encode("utf-8", "backslashreplace")


def render_csv_rows(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[bytes]:
    """Render CSV, in which no cell is a formula."""
    yield write_rows([[disarm(name) for name in names]])
    for start in range(0, len(rows), _PIECE_SIZE):
        batch = rows[start : start + _PIECE_SIZE]
        yield write_rows([disarm(_make_csv_cell(value)) for value in row] for row in batch)


def _make_csv_cell(value: Any) -> str | int | None:
    if isinstance(value, bool) or not isinstance(value, int | None):
        return _write_cell(value)
    return value


def render_json_rows(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[bytes]:
    """Render a JSON list with an object for each row."""
    before = b"[\n"
    for row in rows:
        values = map(make_json_value, row)
        yield before + encode_json(dict(zip(names, values, strict=True)))
        before = b",\n"
    yield b"\n]\n" if rows else b"[]\n"


def render_arrow(table: Any) -> bytes:
    """An Arrow table as a file of Arrow's IPC format."""
    pyarrow = import_package("pyarrow", "a query")
    sink = pyarrow.BufferOutputStream()
    with import_package("pyarrow.ipc", "a query").new_file(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def make_json_value(value: Any) -> Any:
    """A cell as JSON has it: decimals become numbers."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value


def _write_cell(value: Any) -> str:
    """A value on one line; a missing one is empty."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case list() | tuple():
            return ", ".join(map(_write_cell, value))
        case _:
            return sanitize_text(str(value))


def list_columns() -> list[tuple[str, str]]:
    """Every table, with the names of its columns."""
    return [
        (table.name, ", ".join(column.name for column in table.columns))
        for table in make_tables().values()
    ]


def list_tables() -> TextTable:
    """Every table with its columns, for the terminal."""
    listed = TextTable(box=None, pad_edge=False, header_style="bold")
    listed.add_column("table", no_wrap=True)
    listed.add_column("columns")
    for name, columns in list_columns():
        listed.add_row(name, columns)
    return listed


_HEADING = """\
# Tables of a recording

The tables that `shardscope query` reads, and `recording.to_arrow(table)`, `.to_pandas(table)` and
`.to_polars(table)` make. They are derived from the [data model](record.md), where each field is
explained: a record inside a record becomes a column for each of its fields, a list of records a
table of its own. Columns that name the containing record come first. Ranks are text (`0-7`,
`0-1016/8` is every eighth), a mesh is `dp=2,tp=4`, and what was not recorded is NULL. With several
recordings every table begins with the column `recording`, the file's name.

`make schema` writes this page.
"""


def describe_tables() -> str:
    """The reference of all tables, in Markdown."""
    return "\n".join([_HEADING, *map(_describe_table, make_tables().values())])


def _describe_table(table: Table) -> str:
    summary = inspect.cleandoc(table.record.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    rows = "\n".join(f"| `{column.name}` | {column.type} |" for column in table.columns)
    place = ".".join(table.path)
    return f"## {table.name}\n\n{summary} From `{place}`.\n\n| column | type |\n|---|---|\n{rows}\n"


if __name__ == "__main__":
    print(describe_tables(), end="")
