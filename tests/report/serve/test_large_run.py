"""Sums that DuckDB computes of a file are those that Python computes of its records."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

import sample_recordings as samples
from huge_run import write_huge
from large_recording import make_large
from shardscope.record import Collective, CollectiveKind, Recording, load, save
from shardscope.record.codec import open_parquet
from shardscope.report.html.html import build_page
from shardscope.report.html.page import Calls, Communication, Matrix
from shardscope.report.model.traffic_totals import (
    TrafficSummary,
    summarize_traffic,
)
from shardscope.report.serve import large_run
from shardscope.report.serve.large_run import summarize_file

EXAMPLES = Path(__file__).parents[3] / "examples" / "recordings"


def _summarize(path: Path) -> tuple[Recording, TrafficSummary]:
    file, rest = open_parquet(path)
    return summarize_file(file, rest, file.read_table())


def _make_uneven() -> Recording:
    """Eight ranks in three sets, one without collectives, with calls whose destination is known."""
    calls = [
        samples.make_collective(
            rank=rank,
            order=order,
            group="all",
            kind=CollectiveKind.SEND if order == 2 else CollectiveKind.ALL_REDUCE,
            peer=(rank + 1) % 8 if order == 2 else None,
            axis=None if order == 1 else "dp",
            wire_bytes=100 * (order + 1) * (2 if rank > 3 else 1),
        )
        for rank in range(7)
        for order in range(3)
    ]
    return samples.make_recording(tuple(calls), ranks=tuple(range(8)))


@pytest.mark.parametrize(
    "recording",
    [
        samples.make_varied(),
        samples.make_llama(num_layers=2, dp=2, ranks=tuple(range(8))),
        _make_uneven(),
        load(EXAMPLES / "moe.json.gz"),
        replace(make_large(), memory=(), explanations=(), coverage=()),
    ],
    ids=["varied", "llama", "uneven", "moe", "large"],
)
def test_page_of_a_file_is_that_of_its_records(tmp_path: Path, recording: Recording) -> None:
    examples, summary = _summarize(save(recording, tmp_path / "run.parquet"))
    expected = summarize_traffic(recording)
    assert summary == expected
    page, expected_page = build_page(examples, summary=summary), build_page(recording)
    assert page.communication is not None
    assert expected_page.communication is not None
    # A page lists the calls and steps of all ranks if they are few; the server's table has all. The
    # matrix of a file is known by axis and kind only, as not all of its calls become records.
    listed = [
        replace(p.communication, calls=Calls(), steps=(), matrix=_without_parts(p.communication))
        for p in (page, expected_page)
    ]
    assert listed[0] == listed[1]
    assert _sum_parts(page.communication) == _sum_parts(expected_page.communication)
    assert replace(page, communication=None, sources=None) == replace(
        expected_page, communication=None, sources=None
    )


def _without_parts(communication: Communication) -> Matrix | None:
    matrix = communication.matrix
    return None if matrix is None else replace(matrix, parts=None)


def _sum_parts(communication: Communication) -> Counter[tuple[int, int]]:
    """Bytes by pair of ranks and kind."""
    sums: Counter[tuple[int, int]] = Counter()
    parts = communication.matrix and communication.matrix.parts
    if parts:
        for pair, kind, num_bytes in zip(parts.pair, parts.kind, parts.num_bytes, strict=True):
            sums[pair, kind] += num_bytes
    return sums


def test_ranks_that_differ_in_size_only_are_a_set_if_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_call(rank: int, order: int) -> Collective:
        return samples.make_collective(rank=rank, order=order, wire_bytes=1_000 + rank)

    calls = tuple(make_call(rank, order) for rank in range(8) for order in range(10))
    recording = samples.make_recording(calls, ranks=tuple(range(8)))
    path = save(recording, tmp_path / "run.parquet")
    monkeypatch.setattr(large_run, "MAX_RECORDS", 50)
    examples, summary = _summarize(path)
    assert {call.rank for call in examples.collectives} == {7}  # sends most
    assert len(summary.rank_sets) == 1
    assert "are 8 sets of identical ranks. Here, ranks whose collectives differ only in size" in (
        summary.note
    )
    page = build_page(examples, summary=summary)
    assert page.communication is not None
    assert page.communication.ranks[0].example == 7
    assert summary.note in page.communication.left_out


def test_few_records_are_made_of_a_run_of_a_thousand_ranks(tmp_path: Path) -> None:
    path = tmp_path / "huge.parquet"
    write_huge(path, num_calls=30 * 1_024 + 576)
    examples, summary = _summarize(path)
    assert summary.num_calls == 30 * 1_024 + 576
    assert summary.num_senders == 1_024
    assert len(summary.rank_sets) == 5  # four stages; in one, some ranks issued one call more
    assert len(examples.collectives) < 5 * 32
    page = build_page(examples, summary=summary)
    assert page.communication is not None
    assert page.communication.matrix_note == "Not drawn: 1,024 ranks are too many to tell apart."
