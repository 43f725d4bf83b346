"""Files that are damaged, made up or of no known format: a sentence and exit code 2, or a gap."""

from __future__ import annotations

import gzip
import os
import random
from contextlib import suppress
from pathlib import Path

import pytest
from benchmarks.hang.faults import Fault, Outcome, run_fault
from benchmarks.hang.schedule import World
from benchmarks.hang.scoring import WRITERS
from click.testing import CliRunner

from shardscope import explain_hang
from shardscope.cli import main
from shardscope.errors import RecordingError

NUM_MUTATIONS = 12  # of each file


def make_outcome() -> Outcome:
    return run_fault(World({"dp": 2, "tp": 2}), Fault("skip", "tp", 1, 3), seed=3)


def run_hang(*arguments: str | Path) -> tuple[int, str]:
    """The exit code, and what is printed."""
    result = CliRunner().invoke(main, ["hang", *map(str, arguments)], env={"COLUMNS": "500"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize(
    ("name", "content", "fact"),
    [
        ("nccl_trace_rank_0", b"", "it is empty"),
        ("dump", random.Random(0).randbytes(10_000), "it is no file of a known format"),
        ("dump", b"\x80\x02}.", "it has no entries of Flight Recorder"),
        ("dump", b"\x80\x02]K\x01a.", "it has no entries of Flight Recorder"),
        ("dump", b"\x80\x02}X\x07\x00\x00\x00entriesK\x05s.", "it has no entries"),
        ("dump", b"\x80\x02}X\x07\x00\x00\x00entries](K\x01K\x02es.", "it has no entries"),
        ("x.json", b'{"a": 1}', "it is no file of a known format"),
        ("x.json", b'{"entries": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "it has no entries"),
        ("x.json", b'{"communicators": 5}', "known format"),
        ("x.jsonl", b'{"format":"shardscope.stream","schema":99}\n', "a newer shardscope"),
        ("x.jsonl", b'{"format":"shardscope.stream"', "it is truncated"),
        ("x.log", b"Traceback (most recent call last):\n" * 10_000, "nothing about a hang is in"),
        ("x.log", b"[rank0]:" * 200_000, "nothing about a hang is in"),
        ("x.log", b"\0" * 1_000, "it is no file of a known format"),
        ("x.json.gz", gzip.compress(b"\0" * 10_000_000), "it is no file of a known format"),
        ("x.json.gz", gzip.compress(b'{"pg_config": {}}')[:-6], "it is"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_says_nothing_is_refused_with_a_sentence(
    tmp_path: Path, name: str, content: bytes, fact: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    code, printed = run_hang(path)
    assert code == 2
    assert fact in printed
    assert name in printed
    assert printed.startswith("shardscope: ")


def test_a_pipe_a_missing_file_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, fact in (
        ("pipe", "it is a named pipe that nothing writes to"),
        ("none", "there is no file"),
        ("folder", "has no files that ranks leave behind"),
        ("*.pkl", "no file matches"),
    ):
        code, printed = run_hang(tmp_path / name)
        assert (code, fact in printed) == (2, True), printed


def test_without_a_file_the_error_says_what_to_name() -> None:
    with pytest.raises(RecordingError, match="no file is named"):
        explain_hang([])


def test_files_of_no_known_format_among_others_are_named_and_lose_nothing(tmp_path: Path) -> None:
    WRITERS["stream"](make_outcome(), tmp_path)
    expected = explain_hang(tmp_path).hangs[0].causes
    (tmp_path / "evil").write_bytes(b"\x80\x02cos\nsystem\n(X\x04\x00\x00\x00truetR.")
    (tmp_path / "noise").write_bytes(random.Random(0).randbytes(1_000))
    recording = explain_hang([*sorted(tmp_path.glob("run-*")), tmp_path / "evil"])
    assert recording.hangs[0].causes == expected
    (gap,) = recording.gaps
    assert gap.place == str(tmp_path / "evil")
    assert gap.fact == "it would run code (opcode GLOBAL), and only plain data is read"
    # Of a folder, files of other kinds are counted; a pickle that would run code is still named.
    facts = {gap.fact for gap in explain_hang(tmp_path).gaps}
    assert facts == {gap.fact, "1 more file is of no known format"}


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_mutated_files_are_read_or_refused(tmp_path: Path, name: str) -> None:
    WRITERS[name](make_outcome(), tmp_path)
    (path, *_) = files = sorted(tmp_path.iterdir())
    content = path.read_bytes()
    rng = random.Random(name)
    for _ in range(NUM_MUTATIONS):
        path.write_bytes(mutate(rng, content))
        with suppress(RecordingError):
            explain_hang(files)


def mutate(rng: random.Random, content: bytes) -> bytes:
    """The content with a part that is cut out, repeated, or made of other bytes."""
    start = rng.randrange(len(content))
    length = rng.randrange(1, 200)
    match rng.randrange(4):
        case 0:
            return content[:start]
        case 1:
            return content[:start] + content[start + length :]
        case 2:
            return content[: start + length] + content[start:]
    return content[:start] + rng.randbytes(min(length, 8)) + content[start + 8 :]
