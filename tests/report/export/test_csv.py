"""The table has a row per collective that any CSV reader reads and no spreadsheet runs."""

from __future__ import annotations

import csv
from io import StringIO

import pytest

from sample_recordings import every_cause, make_collective, make_recording
from shardscope.record import Source
from shardscope.report.export.csv import render_csv


def _rows(recording):
    return list(csv.DictReader(StringIO(render_csv(recording), newline="")))


def test_every_collective_is_a_row(any_recording):
    rows = _rows(any_recording)
    assert len(rows) == len(any_recording.collectives)
    assert [int(row["order"]) for row in rows] == [c.order for c in any_recording.collectives]


def test_empty_recording_has_the_header_alone():
    text = render_csv(make_recording())
    assert text.startswith("rank,order,group,group_order,kind,op,")
    assert text.count("\n") == 1


def test_every_row_is_a_single_line(varied):
    assert len(render_csv(varied).splitlines()) == 1 + len(varied.collectives)
    assert not {"\x1b", "\x00", "\r"} & set(render_csv(varied))


def test_no_row_is_ragged(varied):
    for row in _rows(varied):
        assert None not in row
        assert None not in row.values()


@pytest.mark.parametrize("start", ["=", "+", "-", "@"])
def test_spreadsheet_formulas_are_escaped(start):
    call = make_collective(owner=f"{start}1+1", source=Source(file=f"{start}cmd", line=1))
    (row,) = _rows(make_recording((call,)))
    assert row["owner"] == f"'{start}1+1"
    assert row["source_file"] == f"'{start}cmd"


def test_causes_have_columns_of_their_own():
    calls = tuple(
        make_collective(order=order, cause=cause) for order, cause in enumerate(every_cause())
    )
    rows = _rows(make_recording(calls))
    assert [row["cause"] for row in rows] == [
        "redistribute",
        "fully_shard",
        "ddp_bucket",
        "ddp_bucket",
        "call",
        "compiled",
        "",
    ]
    assert rows[0]["placements_before"] == "Shard(dim=1)"
    assert rows[0]["is_implicit"] == "true"
    assert rows[0]["cause_detail"] == "aten.mm.default"
    assert rows[1]["num_parameters"] == "9"
    assert rows[2]["cause_detail"] == "layers.0.weight layers.0.bias"
    assert (rows[2]["bucket"], rows[3]["bucket"]) == ("0", "")
    assert rows[4]["cause_detail"] == "torch.distributed.all_reduce"


def test_source_and_numbers_are_as_recorded(llama):
    row = _rows(llama)[0]
    assert (row["kind"], row["phase"], row["axis"]) == ("all_gather", "forward", "dp")
    assert int(row["wire_bytes"]) == llama.collectives[0].wire_bytes
    assert (row["source_file"], row["source_line"]) == ("shardscope/cli/_llama.py", "210")
    assert row["peer"] == ""
