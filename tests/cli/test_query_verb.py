"""query runs SQL on recordings of both formats, and on nothing else."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from io import BytesIO, StringIO
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from sample_recordings import make_varied
from shardscope.cli import main
from shardscope.record import load, save

EXAMPLES = Path(__file__).parents[2] / "examples" / "recordings"
SUMS = (
    "SELECT axis, sum(wire_bytes) AS sent, count(*) AS n FROM collectives GROUP BY axis ORDER BY 2"
)


@pytest.fixture
def query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    shutil.copy(EXAMPLES / "llama.json.gz", "llama.json.gz")
    shutil.copy(EXAMPLES / "moe.json.gz", "moe.json.gz")
    save(load("llama.json.gz"), "llama.parquet")
    return lambda *arguments: CliRunner().invoke(main, ["query", *arguments])


def test_sums_are_those_of_the_records_in_both_formats(query: Callable[..., Result]) -> None:
    calls = load("llama.json.gz").collectives
    expected = sorted(
        (
            sum(call.wire_bytes for call in calls if call.axis == axis),
            sum(call.axis == axis for call in calls),
            axis,
        )
        for axis in {call.axis for call in calls}
    )
    for file in ("llama.json.gz", "llama.parquet"):
        result = query(SUMS, file, "--format", "json")
        rows = [(row["sent"], row["n"], row["axis"]) for row in json.loads(result.stdout)]
        assert rows == expected


def test_every_format_has_the_same_rows(query: Callable[..., Result]) -> None:
    rows = json.loads(query(SUMS, "llama.parquet", "--format", "json").stdout)
    table = query(SUMS, "llama.parquet").stdout.splitlines()
    assert table[0].split() == ["axis", "sent", "n"]
    assert [line.split()[-2:] for line in table[1:]] == [
        [str(row["sent"]), str(row["n"])] for row in rows
    ]
    listed = csv.DictReader(StringIO(query(SUMS, "llama.parquet", "--format", "csv").stdout))
    assert [int(row["sent"]) for row in listed] == [row["sent"] for row in rows]
    marked = query(SUMS, "llama.parquet", "--format", "markdown").stdout.splitlines()
    assert marked[:2] == ["| axis | sent | n |", "|---|---|---|"]
    assert len(marked) == 2 + len(rows)
    arrow = query(SUMS, "llama.parquet", "--format", "arrow").stdout_bytes
    assert pa.ipc.open_file(BytesIO(arrow)).read_all()["n"].to_pylist() == [r["n"] for r in rows]
    assert query(SUMS, "llama.parquet", "-o", "sums.csv").output == "saved sums.csv\n"
    assert "already exists" in query(SUMS, "llama.parquet", "-o", "sums.csv").stderr


def test_columns_of_the_same_name_are_numbered(query: Callable[..., Result]) -> None:
    sql = "SELECT 1 AS a, 2 AS a, 3 AS a_1"
    rows = json.loads(query(sql, "llama.parquet", "--format", "json").stdout)
    assert rows == [{"a": 1, "a_1": 2, "a_1_1": 3}]
    assert query(sql, "llama.parquet", "--format", "csv").stdout.splitlines()[0] == "a,a_1,a_1_1"


def test_a_column_names_the_recording_if_there_are_several(query: Callable[..., Result]) -> None:
    sql = "SELECT recording, count(*) AS n FROM collectives GROUP BY 1 ORDER BY 1"
    rows = json.loads(query(sql, "llama.parquet", "moe.json.gz", "--format", "json").stdout)
    assert rows == [
        {"recording": "llama.parquet", "n": len(load("llama.json.gz").collectives)},
        {"recording": "moe.json.gz", "n": len(load("moe.json.gz").collectives)},
    ]


@pytest.mark.parametrize(
    ("sql", "sentence"),
    [
        ("SELECT foo FROM collectives", "The table collectives has the columns rank, order, group"),
        ("SELECT * FROM calls", "Table with name calls does not exist"),
        ("SELECT * FROM calls", "The tables are run, groups, modules"),
        ("SELECT order FROM collectives", 'need quotes, as in "order"'),
        ("SELECT 1; SELECT 2", "a query is one SELECT, and this is not"),
        ("", "a query is one SELECT, and this is not"),
        ("CREATE TABLE t AS SELECT 1", "a query is one SELECT"),
        ("COPY (SELECT 1) TO 'out.csv'", "a query is one SELECT"),
        ("SET enable_external_access = true", "a query is one SELECT"),
        ("SELECT * FROM read_csv('secret.csv')", "a query may read only the tables"),
        ("SELECT * FROM 'secret.csv'", "a query may read only the tables"),
        ("SELECT * FROM glob('*')", "a query may read only the tables"),
        ("SELECT * FROM read_text('secret.csv')", "a query may read only the tables"),
    ],
)
def test_queries_that_cannot_run_end_in_a_sentence(
    query: Callable[..., Result], sql: str, sentence: str
) -> None:
    Path("secret.csv").write_text("password\n")
    result = query(sql, "llama.parquet")
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert "password" not in result.output
    assert not Path("out.csv").exists()


def test_tables_are_listed_without_a_recording(query: Callable[..., Result]) -> None:
    listed = query("--tables").stdout
    assert "memory_samples" in listed
    assert "wire_bytes" in listed
    assert "name a query and at least one recording" in query("SELECT 1").stderr


def test_untrusted_text_cannot_act_on_a_terminal_or_a_spreadsheet(
    query: Callable[..., Result],
) -> None:
    save(make_varied(), "varied.json")
    for form in ("table", "csv", "markdown", "json"):
        printed = query("FROM collectives", "varied.json", "--format", form).stdout
        assert not {"\x1b", "\x07", "\x00"} & set(printed)
    markdown = query("SELECT '<b>|' AS x", "varied.json", "--format", "markdown").stdout
    assert markdown.splitlines()[-1] == "| &lt;b>\\| |"
    assert query("SELECT '=1' AS x", "varied.json", "--format", "csv").stdout == "x\n'=1\n"


def test_parquet_is_read_by_the_other_commands(query: Callable[..., Result]) -> None:
    runner = CliRunner()
    shown = [
        runner.invoke(main, ["show", file]).stdout for file in ("llama.json.gz", "llama.parquet")
    ]
    assert shown[0] == shown[1]
    assert runner.invoke(main, ["diff", "llama.json.gz", "llama.parquet"]).exit_code == 0
    exported = runner.invoke(main, ["export", "moe.json.gz", "--to", "parquet"])
    assert exported.output == "saved moe.parquet\n"
    assert load("moe.parquet") == load("moe.json.gz")
    merged = runner.invoke(main, ["merge", "llama.parquet", "-o", "merged.parquet"])
    assert "saved merged.parquet" in merged.stdout
    assert load("merged.parquet").collectives == load("llama.json.gz").collectives
