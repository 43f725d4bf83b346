"""Real gloo ranks that hang and are killed: merging their streams says who is behind."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

import hang_programs
from rank_processes import TIMEOUT_S, start_ranks
from shardscope import Recording, load
from shardscope.cli import main

PROGRAM = Path(hang_programs.__file__)


def count_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def hang(folder: Path, name: str, *num_lines: int, exit_code: int = 1) -> tuple[Recording, str]:
    """Kill all ranks when their streams have so many lines; what merging them gives and prints."""
    files = [folder / f"run-{rank}.jsonl" for rank in range(len(num_lines))]
    deadline = time.monotonic() + TIMEOUT_S
    with start_ranks(len(files), PROGRAM, folder, name) as ranks:
        while any(count_lines(file) < most for file, most in zip(files, num_lines, strict=True)):
            assert time.monotonic() < deadline, [count_lines(file) for file in files]
            time.sleep(0.02)
        for rank in ranks:  # all at once, so that none hears of the end of another
            with suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGSTOP)
    output = folder / "merged.json"
    arguments = ["merge", *map(str, files), "-o", str(output)]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == exit_code, result.output
    return load(output), result.output


def test_rank_that_hangs_in_its_data_loader_is_named_with_its_phase(tmp_path: Path) -> None:
    # A header, the group, and a line for each collective or phase.
    recording, printed = hang(tmp_path, "load_for_ever", 4, 4, 4)
    (finding,) = recording.findings
    assert (finding.rule, finding.rank) == ("rank-behind", 1)
    assert "rank 1 is behind; ranks 0,2 wait for rank 1 in all_reduce" in finding.fact
    assert "at position 1 of group world[0-2]" in finding.fact
    assert "before the recording stops in phase load" in finding.fact
    table = printed.partition("Where the ranks stopped")[2].splitlines()
    rows = [line.split() for line in table if line.startswith("world[0-2]")]
    assert [(row[1], row[2]) for row in rows] == [("0,2", "2"), ("1", "1")]
    assert rows[1][-3:] == ["stopped", "in", "load"]


@pytest.mark.parametrize(
    ("name", "num_lines", "fact"),
    [
        ("receive_first", 4, "a deadlock of receives: rank 0 waits for rank 1 in recv"),
        ("receive_from_anyone", 4, "a deadlock: rank 0 waits for rank 1 in recv"),
        ("order_groups_differently", 3, "a deadlock: rank 0 waits for rank 1 in all_reduce"),
    ],
)
def test_ranks_that_wait_for_each_other_are_a_deadlock(
    tmp_path: Path, name: str, num_lines: int, fact: str
) -> None:
    recording, _ = hang(tmp_path, name, num_lines, num_lines)
    (finding,) = recording.findings
    assert (finding.rule, finding.severity) == ("deadlock", "error")
    assert finding.fact.startswith(fact)
    assert finding.source is not None
    assert finding.source.file.endswith("hang_programs.py")


def test_send_and_receive_with_different_tags_are_named_in_a_gap(tmp_path: Path) -> None:
    recording, printed = hang(tmp_path, "tag_differently", 4, 4, exit_code=0)
    assert recording.findings == ()
    (gap,) = [gap for gap in recording.gaps if gap.place == "group world[0-1]"]
    assert gap.fact.startswith("rank 0 stopped after issuing send float32 16 bytes peer 1")
    assert gap.fact.count("hang_programs.py:") == 2
    assert gap.fact.endswith("wait for each other; tags are not recorded")
    assert "if their tags differ" in " ".join(printed.split())


def test_rank_that_raised_is_named_with_its_exception(tmp_path: Path) -> None:
    # Rank 1 also writes a gap and its end.
    recording, _ = hang(tmp_path, "raise_on_a_rank", 4, 5)
    (finding,) = recording.findings
    assert (finding.rule, finding.rank, finding.severity) == ("rank-behind", 1, "error")
    assert finding.fact.endswith("then raised ValueError: the batch is empty")
