"""Real gloo ranks that hang and are killed: merging their streams says who is behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

import hang_programs
from rank_processes import TIMEOUT_S, start_ranks
from shardscope import Recording, load
from shardscope.cli import main

PROGRAM = Path(hang_programs.__file__)


_LATE = (b'{"process":', b'{"returned":')  # written with other lines, or when a call returns


def count_lines(file: Path) -> int:
    lines = file.read_bytes().splitlines() if file.exists() else []
    return sum(not line.startswith(_LATE) for line in lines)


def has_issued(file: Path, num_collectives: int) -> bool:
    calls = load(file).collectives if count_lines(file) else ()
    return bool(calls) and calls[-1].order == num_collectives - 1


def stop(folder: Path, name: str, *are_reached: Callable[[Path], bool]) -> list[Path]:
    """Kill all ranks when their streams have come to where they hang; their streams."""
    files = [folder / f"run-{rank}.jsonl" for rank in range(len(are_reached))]
    deadline = time.monotonic() + TIMEOUT_S
    with start_ranks(len(files), PROGRAM, folder, name) as ranks:
        for file, is_reached in zip(files, are_reached, strict=True):
            while not is_reached(file):
                assert time.monotonic() < deadline, [count_lines(file) for file in files]
                time.sleep(0.02)
        for rank in ranks:  # all at once, so that none hears of the end of another
            with suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGSTOP)
    return files


def hang(folder: Path, name: str, *num_lines: int, exit_code: int = 1) -> tuple[Recording, str]:
    """Kill all ranks when their streams have so many lines; what merging them gives and prints."""
    files = stop(folder, name, *(partial(_has_lines, num_lines=number) for number in num_lines))
    output = folder / "merged.json"
    arguments = ["merge", *map(str, files), "-o", str(output)]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == exit_code, result.output
    return load(output), result.output


def _has_lines(file: Path, num_lines: int) -> bool:
    return count_lines(file) >= num_lines


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


def analyze(files: list[Path], output: Path) -> Recording:
    """What `shardscope hang` finds in the files."""
    arguments = ["hang", *map(str, files), "-o", str(output)]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == 1, result.output
    return load(output)


def test_a_rank_that_hangs_after_the_first_calls_were_dropped_is_named(tmp_path: Path) -> None:
    total = hang_programs.NUM_BEFORE + 2
    files = stop(
        tmp_path,
        "load_after_many",
        partial(has_issued, num_collectives=total),
        lambda file: file.exists() and b'{"begin":' in file.read_bytes(),
        partial(has_issued, num_collectives=total),
    )
    assert max(file.stat().st_size for file in files) < hang_programs.STREAM_BYTES + 4096
    stream = load(files[0])
    assert stream.dropped[0].num_collectives + len(stream.collectives) == total
    assert stream.processes[0].pid != load(files[1]).processes[0].pid
    (analysis,) = analyze(files, tmp_path / "hang.json").hangs
    assert analysis.causes[0].ranks[0].first == 1
    (wait,) = analysis.waits
    assert (wait.position, wait.group) == (total - 1, "world[0-2]")
    assert any("only the newest calls" in fact for fact in analysis.unknowns)


def test_transfers_are_paired_although_the_first_were_dropped(tmp_path: Path) -> None:
    total = hang_programs.NUM_BEFORE + 2
    is_reached = partial(has_issued, num_collectives=total)
    files = stop(tmp_path, "receive_after_many", is_reached, is_reached)
    output = tmp_path / "merged.json"
    CliRunner().invoke(main, ["merge", *map(str, files), "-o", str(output)])
    merged = load(output)
    (finding,) = merged.findings
    assert finding.rule == "deadlock"
    assert finding.fact.startswith("a deadlock of receives: rank 0 waits for rank 1 in recv")
    assert {(record.rank, record.kind, record.peer) for record in merged.dropped} == {
        (rank, kind, 1 - rank) for rank in range(2) for kind in ("send", "recv")
    }
    recording = analyze(files, tmp_path / "hang.json")
    assert recording.findings[0].fact.startswith("a deadlock of receives")


def test_streams_say_when_calls_returned(tmp_path: Path) -> None:
    total = hang_programs.NUM_BEFORE + 2
    is_reached = partial(has_issued, num_collectives=total)
    (file, _) = stop(tmp_path, "receive_after_many", is_reached, is_reached)
    *earlier, last = load(file).collectives
    assert last.returned_ns is None
    for call in earlier:
        assert call.start_ns is not None
        assert call.returned_ns is not None
        assert call.start_ns <= call.returned_ns <= (last.start_ns or 0)
