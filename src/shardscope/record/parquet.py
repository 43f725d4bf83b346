"""Recordings as Parquet files: collectives in columns, everything else as JSON in the footer.

The columns are those of the table `collectives` (`tables.py`), which pandas, polars and DuckDB read
as they are, and the JSON of each cause, of which the other columns have only a description.
"""

from __future__ import annotations

import base64
import gzip
import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, final

import msgspec
from msgspec import inspect as types
from msgspec.structs import replace

from shardscope.errors import OutputError, RecordingError
from shardscope.record.arrow import import_package, make_arrow, make_arrow_schema, make_integers
from shardscope.record.base import Source
from shardscope.record.encoding import FileHeader, encode_json, explain_damage
from shardscope.record.files import MAX_BYTES, decompress, read_file
from shardscope.record.recording import FORMAT, SCHEMA, Cause, Collective, Recording
from shardscope.record.tables import Column, ColumnType, make_tables

MAGIC = b"PAR1"
ENDING = ".parquet"
_HEADER_KEY, _RECORD_KEY = b"shardscope.header", b"shardscope.recording"
CAUSE_COLUMN = "cause_record"
_MAX_ROWS = 2**24
_MAX_FOOTER_BYTES = 2**30
_ROWS_PER_GROUP = 2**17
_BATCH_ROWS = 2**16
_PURPOSE = "a recording in Parquet"
_REMEDY = "The file was damaged or edited; record again."
_CAUSE_DECODER = msgspec.json.Decoder(Cause)


def is_parquet_name(path: str | os.PathLike[str]) -> bool:
    """Whether a file of this name is to be written as Parquet."""
    name = os.fspath(path).lower()
    if name.endswith(f"{ENDING}.gz"):
        raise OutputError(
            f"cannot write '{os.fspath(path)}': Parquet is compressed by itself. Leave out .gz."
        )
    return name.endswith(ENDING)


def check_format(path: str | os.PathLike[str]) -> None:
    """Raise if a recording of this name could not be saved, before work is spent on it."""
    if is_parquet_name(path):
        import_package("pyarrow.parquet", _PURPOSE)


def is_parquet_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file's contents are Parquet, whatever its name."""
    return read_file(path, start=b"{").startswith(MAGIC)


def encode_parquet(recording: Recording) -> bytes:
    """A recording as the bytes of a Parquet file."""
    return encode_columns(make_columns(recording), recording)


def make_columns(recording: Recording) -> Any:
    """The columns of a Parquet file: those of the table `collectives`, and each cause as JSON."""
    pyarrow = import_package("pyarrow", _PURPOSE)
    causes: dict[Any, str | None] = {None: None}
    for call in recording.collectives:
        if call.cause not in causes:
            causes[call.cause] = encode_json(call.cause).decode()
    records = [causes[call.cause] for call in recording.collectives]
    return make_arrow(recording).append_column(
        CAUSE_COLUMN, pyarrow.array(records, pyarrow.string())
    )


def encode_columns(columns: Any, recording: Recording) -> bytes:
    """A Parquet file of these columns, and of everything in a recording but its collectives."""
    pyarrow = import_package("pyarrow", _PURPOSE)
    writers = import_package("pyarrow.parquet", _PURPOSE)
    sink = pyarrow.BufferOutputStream()
    with writers.ParquetWriter(
        sink, columns.schema, compression="zstd", write_page_checksum=True
    ) as writer:
        writer.write_table(columns, row_group_size=_ROWS_PER_GROUP)
        writer.add_key_value_metadata(_encode_footer(recording))
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _encode_footer(recording: Recording) -> dict[bytes, bytes]:
    rest = replace(recording, collectives=())
    # No time in it, so that the same recording gives the same bytes; other readers of Parquet
    # want text here.
    packed = base64.b64encode(gzip.compress(encode_json(rest), mtime=0))
    header = encode_json(FileHeader(format=FORMAT, schema=SCHEMA))
    return {_HEADER_KEY: header, _RECORD_KEY: packed}


@final
class ParquetRecording:
    """An open Parquet file: its records without the collectives, and the collectives as columns.

    `num_bytes` is the size of the file and of the JSON in it, `num_calls` the number of
    collectives.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.fspath(path)
        texts = _list_texts()
        with self._explaining():
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise OSError("it is not a regular file")
            self._file, footer = self._open(texts)
            metadata: Mapping[bytes, bytes] = footer.metadata or {}
            self.num_calls: int = footer.num_rows
            num_unpacked = sum(
                footer.row_group(index).total_byte_size for index in range(footer.num_row_groups)
            )
        self.header = self._read_header(metadata)
        if self.num_calls > _MAX_ROWS or num_unpacked > MAX_BYTES:
            raise RecordingError(
                f"'{self.name}' claims {self.num_calls:,} collectives of {num_unpacked:,} bytes, "
                f"more than a recording may have. Check that it is a recording; if it is, record "
                "fewer steps."
            )
        self._packed = metadata.get(_RECORD_KEY, b"")
        self.num_bytes = os.path.getsize(path)

    def _open(self, texts: list[Column]) -> tuple[Any, Any]:
        """The file, opened so that texts are read as dictionaries, and its footer."""
        readers = import_package("pyarrow.parquet", _PURPOSE)
        footer = readers.ParquetFile(self.name, thrift_string_size_limit=_MAX_FOOTER_BYTES).metadata
        names = set(footer.schema.names)
        file = readers.ParquetFile(
            self.name,
            metadata=footer,
            read_dictionary=[text.name for text in texts if text.name in names],
            page_checksum_verification=True,
        )
        return file, footer

    def _read_header(self, metadata: Mapping[bytes, bytes]) -> FileHeader:
        try:
            return msgspec.json.decode(metadata[_HEADER_KEY], type=FileHeader)
        except (KeyError, ValueError) as error:
            raise RecordingError(
                f"'{self.name}' is Parquet but not a shardscope recording: its footer has no "
                f"'{_HEADER_KEY.decode()}'. Name a file that shardscope wrote."
            ) from error

    def read_rest(self, decoder: msgspec.json.Decoder[Recording]) -> Recording:
        """The recording without its collectives."""
        data = b""
        try:
            packed = base64.b64decode(self._packed, validate=True)
            data = decompress(packed, name=self.name, max_bytes=MAX_BYTES, start=b"{")
            recording = decoder.decode(data)
        except (ValueError, RecursionError) as error:
            raise RecordingError(explain_damage(error, data, self.name)) from error
        self.num_bytes += len(data)
        return recording

    def read_table(self, columns: Sequence[str] | None = None) -> Any:
        """The collectives as an Arrow table, after a check of every column that is read.

        Texts are dictionaries, so that a million of them are small.
        """
        expected = _expected_schema()
        columns = expected.names if columns is None else columns
        with self._explaining():
            known = set(self._file.schema_arrow.names)
            table = self._file.read(columns=[name for name in columns if name in known])
            table.validate(full=True)
        for name in columns:
            if name in known:
                self._check_column(table[name], expected.field(name))
            elif name in _required_fields():
                self._refuse(f"the column {name} is missing")
        return table

    def list_calls(
        self, table: Any = None, ranks: Collection[int] | None = None
    ) -> Iterator[Collective]:
        """Each collective of a table that was read, or of the file, as a record."""
        compute = import_package("pyarrow.compute", _PURPOSE)
        chosen = None if ranks is None else make_integers(sorted(ranks))
        reader = _CallReader(self.name)
        table = self.read_table() if table is None else table
        for batch in table.to_batches(max_chunksize=_BATCH_ROWS):
            # Not the table: filtering it would first make one dictionary of those of all batches.
            if chosen is not None:
                batch = batch.filter(compute.is_in(batch.column("rank"), value_set=chosen))
            yield from reader.read(batch)

    def _check_column(self, column: Any, expected: Any) -> None:
        """Raise RecordingError unless type and values are those of collectives."""
        pyarrow = import_package("pyarrow", _PURPOSE)
        is_dictionary = pyarrow.types.is_dictionary(column.type)
        kind = column.type.value_type if is_dictionary else column.type
        if kind != expected.type:
            self._refuse(f"the column {expected.name} has values of {kind}")
        if column.null_count and expected.name in _required_fields():
            self._refuse(f"the column {expected.name} lacks values")
        self._check_values(expected.name, column)

    def _check_values(self, name: str, column: Any) -> None:
        compute = import_package("pyarrow.compute", _PURPOSE)
        field_type = _field_types().get(name)
        if isinstance(field_type, types.IntType):
            values = compute.min_max(column).as_py()
            high = field_type.le if field_type.lt is None else field_type.lt - 1
            low = field_type.ge
            if values["min"] is None:
                return
            if (low is not None and values["min"] < low) or (
                high is not None and values["max"] > high
            ):
                self._refuse(
                    f"the column {name} has values from {values['min']} to {values['max']}"
                )
        elif isinstance(field_type, types.EnumType):
            texts = (chunk.dictionary.to_pylist() for chunk in column.chunks)
            unknown = {text for dictionary in texts for text in dictionary} - set(field_type.cls)
            if unknown:
                self._refuse(f"the column {name} has an unknown value {str(min(unknown))[:40]!r}")

    def _refuse(self, fact: str) -> None:
        raise RecordingError(f"'{self.name}' cannot be read: {fact}. {_REMEDY}")

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Turn errors of the disk and of Arrow into RecordingError."""
        pyarrow = import_package("pyarrow", _PURPOSE)
        try:
            yield
        except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
            fact = " ".join(str(error).split())[:200] or type(error).__name__
            raise RecordingError(
                f"'{self.name}' cannot be read as Parquet ({fact}). Copy it again, or record again."
            ) from error


def _list_texts() -> list[Column]:
    columns = make_tables()["collectives"].columns
    texts = [column for column in columns if column.type is ColumnType.TEXT]
    return [*texts, texts[0]._replace(name=CAUSE_COLUMN)]


@cache
def _expected_schema() -> Any:
    pyarrow = import_package("pyarrow", _PURPOSE)
    schema = make_arrow_schema(make_tables()["collectives"].columns)
    return schema.append(pyarrow.field(CAUSE_COLUMN, pyarrow.string()))


@cache
def _field_types() -> dict[str, types.Type]:
    """The types of collectives' fields, without None."""
    field_types = {}
    info = types.type_info(Collective)
    assert isinstance(info, types.StructType)
    for field in info.fields:
        parts = field.type.types if isinstance(field.type, types.UnionType) else (field.type,)
        field_types[field.name] = next(p for p in parts if not isinstance(p, types.NoneType))
    return field_types


@cache
def _required_fields() -> frozenset[str]:
    """Columns that every row has a value in."""
    info = types.type_info(Collective)
    assert isinstance(info, types.StructType)
    return frozenset(f.name for f in info.fields if not isinstance(f.type, types.UnionType))


@final
class _CallReader:
    """Makes collectives from batches of columns; equal texts, causes and lines are one object."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: dict[Any, Any] = {}
        self._causes: dict[str | None, Cause | None] = {None: None}
        self._sources: dict[tuple[Any, ...], Source | None] = {}
        self._enums = {
            field: kind.cls
            for field, kind in _field_types().items()
            if isinstance(kind, types.EnumType)
        }

    def read(self, batch: Any) -> Iterator[Collective]:
        columns = {
            field: self._read_column(batch, field)
            for field in Collective.__struct_fields__
            if field in batch.schema.names and field not in ("cause", "source")
        }
        lines = [f"source_{field}" for field in Source.__struct_fields__]
        if all(line in batch.schema.names for line in lines):
            rows = zip(*(self._read_column(batch, line) for line in lines), strict=True)
            columns["source"] = [self._find_source(row) for row in rows]
        if CAUSE_COLUMN in batch.schema.names:
            columns["cause"] = [self._find_cause(t) for t in self._read_column(batch, CAUSE_COLUMN)]
        names = tuple(columns)
        for values in zip(*columns.values(), strict=True):
            yield Collective(**dict(zip(names, values, strict=True)))

    def _read_column(self, batch: Any, name: str) -> list[Any]:
        column = batch.column(name)
        if not hasattr(column, "dictionary"):
            values: list[Any] = column.to_pylist()
            return values
        kind = self._enums.get(name, str)
        remember = self._known.setdefault
        texts = [text if text is None else kind(text) for text in column.dictionary.to_pylist()]
        texts = [remember((kind, text), text) for text in texts]
        return [None if index is None else texts[index] for index in column.indices.to_pylist()]

    def _find_source(self, row: tuple[Any, ...]) -> Source | None:
        if row not in self._sources:
            if row[0] is None:
                self._sources[row] = None
            elif None in row or row[1] < 0:
                raise RecordingError(
                    f"'{self._name}' has a source line without a file, line, function or text. "
                    f"{_REMEDY}"
                )
            else:
                fields = dict(zip(Source.__struct_fields__, row, strict=True))
                self._sources[row] = Source(**fields)
        return self._sources[row]

    def _find_cause(self, text: str | None) -> Cause | None:
        if text not in self._causes:
            assert text is not None
            try:
                self._causes[text] = _CAUSE_DECODER.decode(text)
            except (ValueError, RecursionError) as error:
                raise RecordingError(explain_damage(error, text.encode(), self._name)) from error
        return self._causes[text]
