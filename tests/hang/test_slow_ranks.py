"""Runs that did not hang: which rank the others waited for, and how long transfers took."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from shardscope.hang.evidence import (
    CallColumns,
    CallSignature,
    ColumnBuilder,
    FileFormat,
    FileReport,
    GroupFact,
    RankEvidence,
)
from shardscope.hang.explain import explain_reports
from shardscope.record import CollectiveKind
from shardscope.record.hang_records import HangAnalysis

MS = 1_000_000
NUM_CALLS = 40
TRANSFER_NS = 2 * MS
T0_NS = 1_790_000_000_000_000_000


def make_run(
    work_ns: Callable[[int, int], int],
    *,
    backend: str = "gloo",
    clocks: dict[int, tuple[str, int]] | None = None,
    has_ends: bool = True,
) -> list[FileReport]:
    """Files of ranks that work for `work_ns(rank, call)` before each collective of all ranks.

    `clocks` has the host of each rank and by how much its clock is ahead.
    """
    num_ranks = 4
    builders = [ColumnBuilder(0) for _ in range(num_ranks)]
    now = [T0_NS] * num_ranks
    for number in range(NUM_CALLS):
        arrived = [now[rank] + work_ns(rank, number) for rank in range(num_ranks)]
        end = max(arrived) + TRANSFER_NS + number % 3
        for rank in range(num_ranks):
            ahead = clocks[rank][1] if clocks else 0
            duration = end + rank % 2 - arrived[rank] if has_ends else 0
            times = arrived[rank] + ahead, 0, 0, duration
            builders[rank].add(number, number, 0, 0, 0, times)
        now = [end] * num_ranks
    return [
        make_report(rank, builders[rank].build(), backend, clocks[rank][0] if clocks else "")
        for rank in range(num_ranks)
    ]


def make_report(rank: int, columns: CallColumns, backend: str, host: str) -> FileReport:
    evidence = RankEvidence(
        path=f"run-{rank}",
        format=FileFormat.STREAM,
        rank=rank,
        host=host,
        groups=(GroupFact("0", "default_pg", (0, 1, 2, 3), label="world", backend=backend),),
        signatures=(CallSignature(CollectiveKind.ALL_REDUCE, "all_reduce", "float32", 4, 4),),
        columns=(columns,),
        is_finished=True,
        first_ns=T0_NS,
        last_ns=T0_NS + MS,
    )
    return FileReport(path=evidence.path, format=evidence.format, ranks=(evidence,))


def explain(reports: list[FileReport]) -> HangAnalysis:
    (hang,) = explain_reports(reports).hangs
    assert not hang.is_hang
    return hang


def late(rank: int, number: int) -> int:
    """Rank 2 works 6 ms longer than the others."""
    return (10 if rank != 2 else 16) * MS


def test_waiting_and_transfer_are_separated() -> None:
    hang = explain(make_run(late))
    (skew,) = hang.skews
    assert (skew.last_rank, skew.num_last) == (2, NUM_CALLS)
    assert skew.transfer_ns == pytest.approx(TRANSFER_NS, abs=5)
    assert skew.skew_ns == pytest.approx(6 * MS * 3 / 4, abs=5)
    (slow,) = hang.slow_ranks
    assert slow.rank == 2
    assert slow.mean_late_ns == pytest.approx(6 * MS, abs=5)


def test_the_end_of_calls_that_do_not_block_is_not_known() -> None:
    (skew,) = explain(make_run(late, has_ends=False)).skews
    assert skew.transfer_ns is None
    assert skew.skew_ns == pytest.approx(6 * MS * 3 / 4, abs=5)


@pytest.mark.parametrize("ahead_ms", [0, 3, -4_000, 3_600_000])
def test_clocks_of_hosts_are_aligned_by_the_collectives(ahead_ms: int) -> None:
    clocks = {rank: (f"node-{rank // 2}", (rank // 2) * ahead_ms * MS) for rank in range(4)}
    hang = explain(make_run(late, clocks=clocks))
    (slow,) = hang.slow_ranks
    assert slow.rank == 2
    (skew,) = hang.skews
    assert skew.last_rank == 2


def test_durations_on_the_device_tell_the_last_rank_and_the_transfer() -> None:
    hang = explain(make_run(late, backend="nccl"))
    (skew,) = hang.skews
    assert skew.last_rank == 2
    assert skew.transfer_ns == pytest.approx(TRANSFER_NS, abs=5)


def test_ranks_that_take_turns_to_be_last_are_not_slow() -> None:
    rng = random.Random(0)
    works = [
        [rng.randrange(10 * MS, 10 * MS + MS // 5) for _ in range(4)] for _ in range(NUM_CALLS)
    ]
    hang = explain(make_run(lambda rank, number: works[number][rank]))
    assert hang.slow_ranks == ()
