"""Opens recordings as a database in memory, whose queries can read nothing but their tables."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count
from typing import Any, final

from shardscope.errors import QueryError
from shardscope.record import Recording, load
from shardscope.record.arrow import import_package, make_arrow, make_arrow_schema
from shardscope.record.codec import open_parquet
from shardscope.record.parquet import ParquetRecording, is_parquet_file
from shardscope.record.tables import make_tables

_PURPOSE = "a query"
# Queries must not reach files, other databases or the network.
_CONFIG = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
}
_MAX_FACT = 300  # characters of a message of DuckDB's
_MAX_COLUMNS = 12  # named in a message


def connect() -> Any:
    """Open an empty database in memory, whose settings cannot be changed."""
    connection = import_package("duckdb", _PURPOSE).connect(":memory:", config=_CONFIG)
    connection.execute("SET lock_configuration = true")
    return connection


@final
class OpenRecording:
    """A recording whose tables are made when they are first asked for.

    The collectives of a Parquet file are read as columns and never become records.
    """

    def __init__(self, name: str, recording: Recording, file: ParquetRecording | None = None):
        self.name = name
        self.recording = recording  # without collectives if there is a file
        self.file = file
        self._tables: dict[str, Any] = {}

    def make_table(self, name: str) -> Any:
        """The Arrow table of this name."""
        if name not in self._tables:
            if name == "collectives" and self.file is not None:
                names = [column.name for column in make_tables()[name].columns]
                self._tables[name] = self.file.read_table(names)
            else:
                self._tables[name] = make_arrow(self.recording, name)
        return self._tables[name]


def open_recording(path: str | os.PathLike[str]) -> OpenRecording:
    """Open a recording of either format."""
    name = os.fspath(path)
    if not is_parquet_file(path):
        return OpenRecording(name, load(path))
    file, rest = open_parquet(path)
    return OpenRecording(name, rest, file)


@final
class Database:
    """The tables of recordings; of several, with a column `recording` that names the file."""

    def __init__(self, recordings: Sequence[OpenRecording]) -> None:
        self._duckdb = import_package("duckdb", _PURPOSE)
        self._recordings = recordings
        self._registered: set[str] = set()
        self._connection = connect()

    def run(self, sql: str, parameters: Sequence[Any] = ()) -> tuple[list[str], list[Any]]:
        """The names of a query's columns, all different (`rank`, `rank_1`), and its rows."""
        with self._explaining(sql):
            self._prepare(sql)
            cursor = self._connection.execute(sql, list(parameters))
            return _number_repeated(column[0] for column in cursor.description), cursor.fetchall()

    def run_to_arrow(self, sql: str) -> Any:
        """A query's result as a `pyarrow.Table`."""
        with self._explaining(sql):
            self._prepare(sql)
            return self._connection.sql(sql).to_arrow_table()

    def _prepare(self, sql: str) -> None:
        statements = self._duckdb.extract_statements(sql)
        kinds = self._duckdb.StatementType
        # A PIVOT consists of several statements.
        if len(statements) != 1 or statements[0].type not in (
            kinds.SELECT,
            kinds.EXPLAIN,
            kinds.MULTI,
        ):
            raise QueryError(
                "a query is one SELECT, and this is not. Write, for example, "
                '"SELECT axis, sum(wire_bytes) FROM collectives GROUP BY axis".'
            )
        for name in make_tables():
            # Only tables that may be meant: making all of them takes seconds.
            is_named = re.search(rf"\b{name}\b", sql, re.IGNORECASE) is not None
            if is_named and name not in self._registered:
                self._connection.register(name, self._join(name))
                self._registered.add(name)

    def _join(self, name: str) -> Any:
        tables = [recording.make_table(name) for recording in self._recordings]
        if len(tables) == 1:
            return tables[0]
        pyarrow = import_package("pyarrow", _PURPOSE)
        schema = make_arrow_schema(make_tables()[name].columns)
        named = []
        for recording, table in zip(self._recordings, tables, strict=True):
            files = pyarrow.array([recording.name] * table.num_rows, pyarrow.string())
            named.append(table.cast(schema).add_column(0, "recording", files))
        return pyarrow.concat_tables(named)

    @contextmanager
    def _explaining(self, sql: str) -> Iterator[None]:
        try:
            yield
        except self._duckdb.Error as error:
            raise QueryError(_explain(error, sql)) from error


def _number_repeated(names: Iterable[str]) -> list[str]:
    """Number repeated names, as of a join: in an object of JSON, one would replace the other."""
    numbered: dict[str, None] = {}
    for name in names:
        candidates = chain([name], (f"{name}_{number}" for number in count(1)))
        numbered[next(name for name in candidates if name not in numbered)] = None
    return list(numbered)


def _explain(error: Exception, sql: str) -> str:
    """A sentence on what is wrong with a query, and the tables or columns that there are."""
    words = str(error).split("\n\nLINE")[0].split()  # without DuckDB's excerpt of the query
    fact = " ".join(words).partition(" Error: ")[2][:_MAX_FACT].rstrip(" .!")
    kind = type(error).__name__
    if kind == "PermissionException":
        return (
            "a query may read only the tables of the recordings, and no files or settings. "
            f"Name recordings as FILE after the query ({fact})."
        )
    if kind == "CatalogException":
        return f"the query failed ({fact}). The tables are {', '.join(make_tables())}."
    named = [name for name in make_tables() if re.search(rf"\b{name}\b", sql, re.IGNORECASE)]
    if kind == "BinderException" and named:
        columns = [column.name for column in make_tables()[named[0]].columns]
        more = ", …" if len(columns) > _MAX_COLUMNS else ""
        listed = ", ".join(columns[:_MAX_COLUMNS])
        return (
            f"the query failed ({fact}). The table {named[0]} has the columns {listed}{more}; "
            "`shardscope query --tables` lists all."
        )
    return (
        f"the query failed ({fact}). Columns called order, group, end or index need quotes, as in "
        '"order"; `shardscope query --tables` lists tables and columns.'
    )
