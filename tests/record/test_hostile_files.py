"""Files that were damaged or made up cost little and raise nothing but our own errors."""

from __future__ import annotations

import gzip
import json
import os
import random
import tracemalloc
from pathlib import Path

import msgspec
import pytest

import hostile_files
import sample_recordings as samples
from shardscope.errors import RecordingError, ShardscopeError
from shardscope.record import RankSpan, load, save
from shardscope.record.files import read_file

NUM_FILES = 150


@pytest.mark.parametrize("seed", range(3))
def test_mutated_files_are_read_or_refused(tmp_path: Path, seed: int) -> None:
    seeds = hostile_files.make_seeds()
    other = save(samples.make_varied(), tmp_path / "other.json")
    path = tmp_path / "mutated.json"
    num_read = 0
    for number in range(NUM_FILES // 3):
        rng = random.Random(1_000 * seed + number)
        path.write_bytes(hostile_files.make_file(rng, seeds))
        for name, step in hostile_files.read(path, other).items():
            try:
                step()
            except ShardscopeError:
                if name == "load":
                    break
            except Exception as error:
                raise AssertionError(f"{name} of file {number} of seed {seed}") from error
        else:
            num_read += 1
    assert num_read > 10  # else nothing was tested but refusals


def _claim(**changes) -> bytes:
    run = {
        "torch_version": "",
        "shardscope_version": "",
        "world_size": 2**20,
        "ranks": [[0, 2**20, 1]],
    }
    plain = {"format": "shardscope.recording", "schema": 1, "run": run | changes.pop("run", {})}
    return json.dumps(plain | changes, separators=(",", ":")).encode()


ONE = {"ranks": [[0, 1, 1]]}
MODULE = {"name": "", "type": "", "ranks": [[0, 1, 1]]}
PROFILE = {"rank": 0, "peak_bytes": 1, "peak_order": 0, "peak_phase": "forward"}
COLUMNS = ("start", "end", "num_bytes", "address", "kind", "phase", "module", "source")
TABLE = {
    "first_order": 0,
    "last_order": 0,
    "modules": [""],
    **{column: [-1] if column == "source" else [0] for column in COLUMNS},
}
CLAIMS = {
    "ranks": (_claim(), r"names 1,048,576 ranks at \$.run.ranks, more than can be in a file of"),
    "modules": (
        _claim(run=ONE, modules=[{**MODULE, "ranks": [[0, 2**20, 1]]}]),
        r"names 1,048,576 ranks at \$.modules, more than can be",
    ),
    "groups": (
        _claim(
            run=ONE,
            groups=[
                {"name": str(n), "torch_name": "", "ranks": [[n, 2**20 - 99]], "num_ranks": 1}
                for n in range(9)
            ],
        ),
        r"names 9,436,293 ranks at its groups",
    ),
    "mesh": (
        _claim(run={**ONE, "axes": [{"name": "a", "size": 2**40}]}),
        r"a mesh of more than 1,048,576 ranks at \$.run.axes",
    ),
    "deep names": (
        _claim(run=ONE, modules=[{**MODULE, "name": "a." * 60_000}]),
        r"names a module 'a\.a\..*…' that is nested more than 512 deep",
    ),
    "slices": (
        _claim(
            run=ONE,
            layouts=[
                {
                    "name": "w",
                    "shape": [4, 4],
                    "axes": [],
                    "placements": [],
                    "slices": [{"ranks": [[0]], "stretches": [[[0, 4]]]}],
                }
            ],
        ),
        r"a slice at \$.layouts\[0\].slices with other dims than its tensor, which has 2",
    ),
    "columns of allocations": (
        _claim(run=ONE, memory=[{**PROFILE, "allocations": {**TABLE, "end": []}}]),
        r"columns of different lengths at \$.memory\[0\].allocations",
    ),
    "positions in allocations": (
        _claim(run=ONE, memory=[{**PROFILE, "allocations": {**TABLE, "module": [3]}}]),
        r"a position at \$.memory\[0\].allocations.module that is not in its list of 1",
    ),
}


@pytest.mark.parametrize("case", CLAIMS)
def test_small_file_that_claims_much_is_refused_before_any_work(tmp_path: Path, case: str) -> None:
    data, fact = CLAIMS[case]
    path = tmp_path / "claim.json"
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(RecordingError, match=fact):
        load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 2**20 + 10 * len(data)  # a chunk is read at once


def test_large_worlds_that_were_recorded_are_not_refused(tmp_path: Path) -> None:
    run = samples.make_run(world_size=2**20)
    world = samples.make_recording(world_size=2**20, run=run)
    many = samples.make_recording(
        world_size=16_384,
        ranks=tuple(range(16_384)),
        modules=tuple(
            samples.Module(name=f"layers.{n}", type="Block", ranks=(RankSpan(0, 16_384),))
            for n in range(1_000)
        ),
    )
    for number, recording in enumerate((world, many)):
        path = save(recording, tmp_path / f"{number}.json")
        assert load(path) == recording


@pytest.mark.parametrize("filler", [b" ", b"[", b'{"a":'])
def test_gzip_that_unpacks_too_much_is_stopped(tmp_path: Path, filler: bytes) -> None:
    path = tmp_path / "bomb.json.gz"
    head = b'{"format":"shardscope.recording","schema":1,"x":'
    path.write_bytes(gzip.compress(head + filler * (40_000_000 // len(filler))))
    assert os.path.getsize(path) < 200_000
    tracemalloc.start()
    with pytest.raises(RecordingError, match=r"holds more than .* with gunzip, and name that file"):
        load(path)
    assert tracemalloc.get_traced_memory()[1] < 80 * 2**20
    tracemalloc.stop()


def test_a_very_repetitive_recording_is_loaded_again(tmp_path: Path) -> None:
    recording = samples.make_varied()
    recording = msgspec.structs.replace(recording, gaps=recording.gaps[:1] * 160_000)
    path = save(recording, tmp_path / "run.json.gz")
    unpacked = len(gzip.decompress(path.read_bytes()))
    assert unpacked > 4 * 2**20 + 150 * path.stat().st_size
    assert load(path) == recording


def test_of_a_file_that_is_no_recording_only_the_beginning_is_read() -> None:
    with pytest.raises(RecordingError, match="does not start as a JSON object"):
        load("/dev/zero")


def test_a_pipe_without_a_writer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardscope.record.files._MAX_WAIT_MS", 1)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(RecordingError, match="a named pipe that nothing writes to"):
        read_file(pipe)


def test_pipe_of_the_shell_is_read() -> None:
    reader, writer = os.pipe()
    os.write(writer, msgspec.json.encode(samples.make_recording()))
    os.close(writer)
    assert load(f"/dev/fd/{reader}") == samples.make_recording()
    os.close(reader)
