"""Recordings as tables of Arrow, pandas and polars: every record is in one, with its values."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas
import polars
import pyarrow
import pytest
from msgspec import inspect as types

import sample_recordings as samples
from large_recording import make_hostile
from shardscope.errors import PluginError, RecordingError
from shardscope.record import (
    Module,
    Parameter,
    RankSpan,
    Recording,
    Redistribute,
    Source,
    load,
)
from shardscope.record.arrow import import_package
from shardscope.record.base import Axis
from shardscope.record.tables import make_tables

EXAMPLES = Path(__file__).parents[2] / "examples" / "recordings"
REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "tables.md"


def test_every_list_of_records_is_a_table() -> None:
    listed = {".".join(table.path) for table in make_tables().values()}
    nested: set[str] = set()

    def walk(record: type, path: tuple[str, ...]) -> None:
        for field in types.type_info(record).fields:
            item = getattr(field.type, "item_type", None)
            if isinstance(item, types.StructType) and item.cls not in (RankSpan, Axis, Source):
                nested.add(".".join((*path, field.name)))
                walk(item.cls, (*path, field.name))

    walk(Recording, ())
    assert listed == nested | {"run", "memory.allocations"}
    for table in make_tables().values():
        names = [column.name for column in table.columns]
        assert len(set(names)) == len(names), table.name


def test_collectives_have_the_values_of_their_records() -> None:
    recording = samples.make_varied()
    table = recording.to_arrow()
    assert table.num_rows == len(recording.collectives)
    for row, call in zip(table.to_pylist(), recording.collectives, strict=True):
        for name in ("rank", "order", "group", "kind", "axis", "wire_bytes", "owner", "start_ns"):
            assert row[name] == getattr(call, name)
        if isinstance(call.cause, Redistribute):
            assert row["cause_type"] == "redistribute"
            assert row["cause_before"] == ", ".join(call.cause.before)
            assert row["cause_is_implicit"] is call.cause.is_implicit
        assert (row["source_line"] is None) == (call.source is None)
    assert pyarrow.types.is_int64(table.schema.field("start_ns").type)


def test_nested_records_name_the_record_they_belong_to() -> None:
    recording = load(EXAMPLES / "llama.json.gz")
    parameters = recording.to_arrow("parameters").to_pylist()
    expected = [
        (module.name, parameter.name, list(parameter.local_shape))
        for module in recording.modules
        for parameter in module.parameters
    ]
    assert [(row["module"], row["name"], row["local_shape"]) for row in parameters] == expected
    samples_of_memory = recording.to_arrow("memory_samples").column_names
    assert samples_of_memory[:5] == ["rank", "order", "phase", "module", "parameters_bytes"]


def test_pandas_and_polars_frames_sum_to_the_same() -> None:
    recording = load(EXAMPLES / "llama.json.gz")
    expected: dict[str, int] = {}
    for call in recording.collectives:
        expected[call.axis or ""] = expected.get(call.axis or "", 0) + call.wire_bytes
    frame = recording.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame["start_ns"].dtype == pandas.Int64Dtype()  # missing values do not make it float
    assert frame.fillna({"axis": ""}).groupby("axis")["wire_bytes"].sum().to_dict() == expected
    sums = recording.to_polars().group_by("axis").agg(polars.col("wire_bytes").sum())
    assert dict(sums.with_columns(polars.col("axis").fill_null("")).iter_rows()) == expected


def test_hostile_texts_fit_into_tables() -> None:
    recording = make_hostile()
    for name, table in make_tables().items():
        assert recording.to_arrow(name).num_rows == len(table.list_rows(recording))


def test_unknown_table_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(RecordingError, match="no table 'calls' in a recording"):
        samples.make_recording().to_arrow("calls")


def test_number_beyond_64_bits_is_refused() -> None:
    parameter = Parameter(name="weight", shape=(2**70,), local_shape=(1,), dtype="int8")
    module = Module(name="", type="Linear", ranks=(RankSpan(0),), parameters=(parameter,))
    huge = samples.make_recording(modules=(module,))
    with pytest.raises(RecordingError, match="the column shape has a number of more than 64 bits"):
        huge.to_arrow("parameters")


def test_missing_package_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(
        PluginError,
        match=r"a recording in Parquet needs the package no_such_one, "
        r"which is not installed. Install it: pip install duckdb pyarrow.",
    ):
        import_package("no_such_one.part", "a recording in Parquet")


def test_reading_recordings_imports_none_of_the_packages() -> None:
    code = (
        "import sys; from shardscope.record import load; import shardscope.cli.export; "
        f"load({str(EXAMPLES / 'llama.json.gz')!r}); "
        "print({'pyarrow', 'duckdb', 'pandas', 'polars'} & set(sys.modules))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert printed.stdout == "set()\n"


def test_reference_lists_the_columns_of_all_tables() -> None:
    command = [sys.executable, "-m", "shardscope.report.query.results"]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    assert REFERENCE.read_text() == made.stdout, "run make schema"
