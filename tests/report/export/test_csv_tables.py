"""Every table has a row per record, on one line, that no spreadsheet runs."""

from __future__ import annotations

import csv
from io import StringIO

from sample_recordings import make_explained, make_holdings, make_phases, make_recording
from shardscope.record import Finding, Mark, MarkKind, Module, RankSpan, Recording, Severity, Source
from shardscope.report.export.csv import TABLES, count_rows, render_table


def read(recording: Recording, name: str) -> list[dict[str, str]]:
    text = b"".join(render_table(recording, name)).decode()
    return list(csv.DictReader(StringIO(text, newline="")))


def test_rows_are_as_many_as_records_and_none_is_ragged(any_recording: Recording) -> None:
    for name in TABLES:
        rows = read(any_recording, name)
        assert len(rows) == count_rows(any_recording, name)
        text = b"".join(render_table(any_recording, name)).decode()
        assert len(text.splitlines()) == 1 + len(rows)
        for row in rows:
            assert None not in row
            assert None not in row.values()
            assert not any(cell.startswith(("=", "+", "@")) for cell in row.values())


def test_parameters_show_their_placements() -> None:
    recording = make_holdings()
    rows = read(recording, "parameters")
    parameters = [parameter for module in recording.modules for parameter in module.parameters]
    assert len(rows) == len(parameters) > 0
    assert [int(row["local_bytes"]) for row in rows] == [
        parameter.local_bytes for parameter in parameters
    ]
    assert {row["is_buffer"] for row in rows} <= {"true", "false"}
    modules = read(recording, "modules")
    assert sum(int(row["num_parameters"]) for row in modules) == len(parameters)


def test_nested_records_share_a_cell() -> None:
    module = Module(
        name="a",
        type="Linear",
        ranks=(RankSpan(0, 4), RankSpan(9)),
        marks=(Mark(kind=MarkKind.FULLY_SHARD, axes=("dp",)), Mark(kind=MarkKind.COMPILED)),
        aliases=("b", "c"),
    )
    finding = Finding(
        rule="r",
        severity=Severity.ERROR,
        subject="s",
        fact="f",
        remedy="=1+1",
        source=Source(file="train.py", line=7),
    )
    recording = make_recording(modules=(module,), findings=(finding,))
    (row,) = read(recording, "modules")
    assert (row["ranks"], row["marks"]) == ("0-3,9", "fully_shard dp, compiled")
    assert row["aliases"] == "b, c"
    (row,) = read(recording, "findings")
    assert (row["severity"], row["source"], row["rank"]) == ("error", "train.py:7", "")
    assert row["remedy"] == "'=1+1"


def test_memory_spans_and_breaks_are_all_there() -> None:
    (profile,) = make_holdings().memory
    total = sum(int(row["num_bytes"]) for row in read(make_holdings(), "memory"))
    assert total == sum(use.num_bytes for use in profile.at_peak) > 0
    spans = make_phases().spans
    assert [int(row["start_ns"]) for row in read(make_phases(), "spans")] == [
        span.start_ns for span in spans
    ]
    sites = [
        site for explanation in make_explained().explanations for site in explanation.break_sites
    ]
    assert len(read(make_explained(), "breaks")) == len(sites) > 0
