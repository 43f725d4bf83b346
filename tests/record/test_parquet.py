"""Recordings in Parquet: the same recording comes back, others can read it, damage is refused."""

from __future__ import annotations

import base64
import gzip
import random
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

import sample_recordings as samples
from shardscope.errors import OutputError, RecordingError
from shardscope.record import Recording, Source, load, save
from shardscope.record.codec import open_parquet

CALL = samples.make_collective(source=Source(file="train.py", line=3))
RECORDING = samples.make_recording(collectives=(CALL,))
EXAMPLES = Path(__file__).parents[2] / "examples" / "recordings"


@pytest.mark.parametrize(
    "recording",
    [
        samples.make_varied(),
        samples.make_parallel(),
        samples.make_explained(),
        samples.make_recording(collectives=()),
        load(EXAMPLES / "llama.json.gz"),
        load(EXAMPLES / "moe.json.gz"),
    ],
    ids=["varied", "parallel", "explained", "empty", "llama", "moe"],
)
def test_recording_comes_back_as_it_was(tmp_path: Path, recording: Recording) -> None:
    path = save(recording, tmp_path / "run.parquet")
    loaded = load(path)
    assert loaded == recording
    assert [type(call.kind) for call in loaded.collectives[:1]] == [
        type(call.kind) for call in recording.collectives[:1]
    ]
    again = save(loaded, tmp_path / "again.parquet")
    assert again.read_bytes() == path.read_bytes()
    renamed = path.rename(tmp_path / "run.json")
    assert load(renamed) == recording  # whatever its name


def test_other_programs_read_the_collectives(tmp_path: Path) -> None:
    recording = load(EXAMPLES / "llama.json.gz")
    path = save(recording, tmp_path / "run.parquet")
    total = sum(call.wire_bytes for call in recording.collectives)
    assert polars.read_parquet(path)["wire_bytes"].sum() == total
    assert duckdb.sql(f"SELECT sum(wire_bytes) FROM '{path}'").fetchall() == [(total,)]


def test_file_is_opened_without_making_records_of_its_collectives(tmp_path: Path) -> None:
    recording = load(EXAMPLES / "llama.json.gz")
    file, rest = open_parquet(save(recording, tmp_path / "run.parquet"))
    assert rest == replace(recording, collectives=())
    assert file.num_calls == len(recording.collectives)
    assert file.read_table(["rank", "kind"]).column_names == ["rank", "kind"]


def test_damaged_files_are_refused_or_read_as_they_were(tmp_path: Path) -> None:
    recording = samples.make_varied()
    data = save(recording, tmp_path / "run.parquet").read_bytes()
    damaged = tmp_path / "damaged.parquet"
    rng, refusals = random.Random(3), []
    for number in range(120):
        changed = bytearray(data)
        if number % 3 == 0:
            del changed[rng.randrange(5, len(changed)) :]
        else:
            for _ in range(rng.choice([1, 4])):
                changed[rng.randrange(4, len(changed))] = rng.randrange(256)
        damaged.write_bytes(changed)
        try:
            assert load(damaged) == recording
        except RecordingError as error:
            refusals.append(str(error))
    assert len(refusals) > 60
    for refusal in refusals:
        assert "damaged.parquet'" in refusal
        assert "\n" not in refusal


def _rewrite(path: Path, change: Any = None, metadata: dict[bytes, bytes] | None = None) -> Path:
    """The file with its columns changed, or other entries in its footer."""
    file = pq.ParquetFile(path)
    table, entries = file.read(), dict(file.metadata.metadata)
    entries.pop(b"ARROW:schema", None)
    table = change(table) if change else table
    changed = path.with_name("changed.parquet")
    with pq.ParquetWriter(changed, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(entries | (metadata or {}))
    return changed


def _set(name: str, value: Any, kind: Any = None) -> Any:
    def change(table: pa.Table) -> pa.Table:
        column = pa.array([value] * table.num_rows, type=kind)
        return table.set_column(table.column_names.index(name), name, column)

    return change


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (_set("rank", 2**20, pa.int64()), "the column rank has values from 1048576 to 1048576"),
        (_set("order", -1, pa.int64()), "the column order has values from -1 to -1"),
        (_set("kind", "gossip"), "the column kind has an unknown value 'gossip'"),
        (_set("phase", None, pa.string()), "the column phase lacks values"),
        (_set("dtype", 7), "the column dtype has values of int64"),
        (_set("owner", "a." * 600), "nested more than 512 deep"),
        (_set("cause_record", "{}"), "is not a recording this version understands"),
        (_set("source_text", None, pa.string()), "a source line without a file, line, function"),
        (_set("rank", 8, pa.int64()), "names rank 8 at $.collectives[0].rank, but its world size"),
        (lambda table: table.drop_columns(["wire_bytes"]), "the column wire_bytes is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_impossible_columns_are_refused(tmp_path: Path, change: Any, fact: str) -> None:
    path = save(RECORDING, tmp_path / "run.parquet")
    with pytest.raises(RecordingError) as caught:
        load(_rewrite(path, change))
    assert fact in str(caught.value)


def test_footer_is_checked_like_json(tmp_path: Path) -> None:
    path = save(RECORDING, tmp_path / "run.parquet")
    bomb = base64.b64encode(gzip.compress(b'{"a":"' + b" " * 30_000_000))
    for metadata, fact in (
        ({b"shardscope.recording": bomb}, "holds more than"),
        ({b"shardscope.recording": b"AAAA"}, "cannot be decompressed"),
        ({b"shardscope.recording": b"!"}, "changed.parquet"),
        ({b"shardscope.header": b'{"format":"shardscope.recording","schema":99}'}, "newer"),
        ({b"shardscope.header": b"?"}, "is Parquet but not a shardscope recording"),
    ):
        with pytest.raises(RecordingError, match=fact):
            load(_rewrite(path, metadata=metadata))


def test_foreign_parquet_and_names_that_say_two_things_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "foreign.parquet")
    with pytest.raises(RecordingError, match="is Parquet but not a shardscope recording"):
        load(tmp_path / "foreign.parquet")
    with pytest.raises(OutputError, match=r"Parquet is compressed by itself. Leave out .gz."):
        save(samples.make_recording(), tmp_path / "run.parquet.gz")


def test_rows_that_claim_more_than_a_recording_may_have_are_refused(tmp_path: Path) -> None:
    num_rows = 2**24 + 1
    table = pa.table({"rank": pa.nulls(num_rows, pa.int8())})
    path = tmp_path / "claim.parquet"
    with pq.ParquetWriter(path, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(
            {b"shardscope.header": b'{"format":"shardscope.recording","schema":2}'}
        )
    assert path.stat().st_size < 100_000
    with pytest.raises(RecordingError, match="claims 16,777,217 collectives"):
        load(path)
