"""Real gloo ranks of which one is killed, stopped or slow: `shardscope hang` names it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import hang_programs
from rank_processes import TIMEOUT_S, run_ranks, start_ranks
from shardscope import explain_hang
from shardscope.record import expand_ranks
from shardscope.record.hang_records import HangAnalysis

PROGRAM = Path(hang_programs.__file__)


def explain(folder: Path) -> HangAnalysis:
    """What the streams of all ranks show."""
    (hang,) = explain_hang(sorted(folder.glob("run-*.jsonl"))).hangs
    assert expand_ranks(hang.ranks) == (0, 1, 2)
    return hang


def test_a_rank_that_was_killed_is_named(tmp_path: Path) -> None:
    ended = run_ranks(3, PROGRAM, tmp_path, "kill_a_rank")
    assert ended[1][0] != 0
    hang = explain(tmp_path)
    cause = hang.causes[0]
    assert (cause.kind, expand_ranks(cause.ranks)) == ("crash", (1,))
    assert cause.position == 22
    assert "closed by another process" in " ".join(cause.evidence)


def test_a_rank_that_was_stopped_is_named(tmp_path: Path) -> None:
    with start_ranks(3, PROGRAM, tmp_path, "stop_a_rank") as ranks:
        wait_until_stopped(ranks[1].pid)
        wait_until_quiet([tmp_path / f"run-{rank}.jsonl" for rank in (0, 2)])
        hang = explain(tmp_path)
    cause = hang.causes[0]
    assert (cause.kind, cause.certainty, expand_ranks(cause.ranks)) == ("slow", "possible", (1,))
    assert cause.position == 22
    assert cause.source is not None
    assert cause.source.function == "train"
    assert [expand_ranks(wait.waiters) for wait in hang.waits] == [(0, 2)]
    assert any("slow, stopped or killed leaves the same" in fact for fact in hang.unknowns)


def test_a_slow_rank_is_named_and_its_delay_is_not_taken_for_transfer(tmp_path: Path) -> None:
    assert [code for code, _ in run_ranks(3, PROGRAM, tmp_path, "slow_a_rank")] == [0, 0, 0]
    hang = explain(tmp_path)
    assert not hang.is_hang
    (slow,) = hang.slow_ranks
    assert slow.rank == 1
    assert slow.excess_ns > 0.5 * 11 * 100_000_000
    (skew,) = hang.skews
    assert skew.last_rank == 1
    assert skew.skew_ns > 10_000_000


def wait_until_stopped(pid: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while "State:\tT" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_until_quiet(files: list[Path]) -> None:
    """Until files have had the same sizes for a second, and as much as the ranks can write."""
    deadline = time.monotonic() + TIMEOUT_S
    sizes, num_same = [0] * len(files), 0
    while num_same < 20:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        now = [file.stat().st_size if file.exists() else 0 for file in files]
        num_same = num_same + 1 if now == sizes and min(now) else 0
        sizes = now


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
