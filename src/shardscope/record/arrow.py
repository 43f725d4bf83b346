"""Tables of a recording as those of Arrow, pandas and polars, which are imported when used."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from shardscope.errors import PluginError, RecordingError
from shardscope.record.recording import Recording
from shardscope.record.tables import Column, ColumnType, Table, make_tables
from shardscope.record.text import replace_surrogates


def import_package(name: str, purpose: str, *, package: str = "duckdb pyarrow") -> Any:
    """Import an optional package, or raise PluginError with the command that installs it.

    `purpose` is what needs it, the subject of the sentence; `package` is what pip installs.
    """
    try:
        return import_module(name)
    except ImportError as error:
        distribution = name.partition(".")[0]
        raise PluginError(
            f"{purpose} needs the package {distribution}, which is not installed. "
            f"Install it: pip install {package}."
        ) from error


def find_table(name: str) -> Table:
    """The table of this name; raises RecordingError with the names of all tables."""
    tables = make_tables()
    if name not in tables:
        raise RecordingError(
            f"there is no table {name!r} in a recording. Its tables are {', '.join(tables)}."
        )
    return tables[name]


def make_arrow(recording: Recording, table: str = "collectives") -> Any:
    """A table of a recording as a `pyarrow.Table`."""
    pyarrow = import_package("pyarrow", "a recording as an Arrow table")
    layout = find_table(table)
    rows = layout.list_rows(recording)
    arrays: dict[str, Any] = {}
    for path in dict.fromkeys((column.depth, column.path) for column in layout.columns):
        columns = [column for column in layout.columns if (column.depth, column.path) == path]
        arrays |= _make_arrays(pyarrow, columns, [row[path[0]] for row in rows])
    schema = make_arrow_schema(layout.columns)
    return pyarrow.table([arrays[name] for name in schema.names], schema=schema)


def make_pandas(recording: Recording, table: str = "collectives") -> Any:
    """A table of a recording as a `pandas.DataFrame`; missing values do not change its types."""
    pandas = import_package("pandas", "a recording as a pandas frame", package="pandas")
    pyarrow = import_package("pyarrow", "a recording as a pandas frame")
    nullable = {pyarrow.int64(): pandas.Int64Dtype(), pyarrow.bool_(): pandas.BooleanDtype()}
    return make_arrow(recording, table).to_pandas(types_mapper=nullable.get)


def make_polars(recording: Recording, table: str = "collectives") -> Any:
    """A table of a recording as a `polars.DataFrame`."""
    polars = import_package("polars", "a recording as a polars frame", package="polars")
    return polars.from_arrow(make_arrow(recording, table))


def make_arrow_schema(columns: Sequence[Column]) -> Any:
    """The Arrow schema of columns."""
    pyarrow = import_package("pyarrow", "a recording as an Arrow table")
    return pyarrow.schema([(column.name, _find_type(pyarrow, column.type)) for column in columns])


def make_integers(values: Iterable[int]) -> Any:
    """An Arrow array of 64-bit integers; unlike `pyarrow.array`, it does not import pandas."""
    pyarrow = import_package("pyarrow", "a recording as an Arrow table")
    numbers = array("q", values)
    buffers = [None, pyarrow.py_buffer(numbers)]
    return pyarrow.Array.from_buffers(pyarrow.int64(), len(numbers), buffers)


def _find_type(pyarrow: Any, kind: ColumnType) -> Any:
    return {
        ColumnType.TEXT: pyarrow.string(),
        ColumnType.INTEGER: pyarrow.int64(),
        ColumnType.NUMBER: pyarrow.float64(),
        ColumnType.BOOLEAN: pyarrow.bool_(),
        ColumnType.TEXTS: pyarrow.list_(pyarrow.string()),
        ColumnType.INTEGERS: pyarrow.list_(pyarrow.int64()),
    }[kind]


def _make_arrays(pyarrow: Any, columns: Sequence[Column], records: list[Any]) -> dict[str, Any]:
    """The arrays of columns that read from the same attribute of these records."""
    path = columns[0].path
    if not path:
        return {column.name: _make_array(pyarrow, column, records) for column in columns}
    codes: dict[Any, int] = {}  # of distinct values, of which there are few
    positions = pyarrow.array(
        [codes.setdefault(getattr(record, path), len(codes)) for record in records],
        type=pyarrow.int32(),
    )
    return {
        column.name: _make_array(pyarrow, column, list(codes)).take(positions) for column in columns
    }


def _make_array(pyarrow: Any, column: Column, records: list[Any]) -> Any:
    kind = _find_type(pyarrow, column.type)
    values = [column.read(record) for record in records]
    try:
        return pyarrow.array(values, type=kind)
    except UnicodeEncodeError:
        return pyarrow.array(list(map(_make_encodable, values)), type=kind)
    except OverflowError as error:
        raise RecordingError(
            f"the column {column.name} has a number of more than 64 bits, which an Arrow table "
            "cannot hold. Use the JSON of the recording instead."
        ) from error


def _make_encodable(value: Any) -> Any:
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, tuple | list):
        return [_make_encodable(item) for item in value]
    return value
