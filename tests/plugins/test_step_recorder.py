"""One step, in stretches, into a file of the rank's own; without any trainer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from shardscope import load, simulate, trace
from shardscope.comm.trace import Trace
from shardscope.errors import OutputError
from shardscope.plugins.step_recorder import StepRecorder
from small_models import Net
from trained_models import said


@pytest.mark.parametrize(
    ("output", "rank", "written"),
    [
        ("run.json.gz", 0, "run-0.json.gz"),
        ("run.shardscope.json", 3, "run.shardscope-3.json"),
        ("run-{rank}-of-4.json", 2, "run-2-of-4.json"),
        ("run", 1, "run-1"),
    ],
)
def test_each_of_several_ranks_has_a_file_of_its_own(
    tmp_path: Path, output: str, rank: int, written: str
) -> None:
    recorder = StepRecorder(1, tmp_path / output, force=False)
    with simulate(mesh={"dp": 4}, rank=rank):
        recorder.prepare()
        recorder.resume(Net())
        recorder.finish()
    assert [path.name for path in tmp_path.iterdir()] == [written]
    assert load(tmp_path / written).run.world_size == 4


def test_parts_of_a_step_are_one_recording_without_the_pauses(tmp_path: Path) -> None:
    model, batch = Net(), torch.zeros(1, 8)
    recorder = StepRecorder(1, tmp_path / "run.json", force=False)
    with simulate(mesh={"dp": 2}):
        with trace(model) as once:
            model(batch)
        for _ in range(2):
            recorder.resume(model)
            recorder.resume(model)  # twice is as well as once
            model(batch)
            recorder.pause()
            recorder.pause()
            model(batch)
        recorder.finish()
        recorder.finish()
    assert said(load(tmp_path / "run-0.json")) == said(once.recording) * 2


@pytest.mark.parametrize(
    ("num_done", "num_next", "expected"),
    [(8, 1, False), (9, 1, True), (10, 1, False), (8, 2, True), (9, 2, True), (7, 2, False)],
)
def test_the_step_is_the_one_after_which_so_many_are_done(
    num_done: int, num_next: int, expected: bool
) -> None:
    recorder = StepRecorder(10, "run.json", force=False)
    assert recorder.wants(num_done, num_next=num_next) is expected


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    recorder = StepRecorder(1, tmp_path / "run.json", force=False)
    recorder.prepare()
    recorder.resume(Net())
    (tmp_path / "run.json").write_text("precious")
    with pytest.raises(OutputError, match="already exists"):
        recorder.finish()
    assert not recorder.is_recording
    assert not recorder.wants(0)
    assert (tmp_path / "run.json").read_text() == "precious"


def test_a_process_that_is_forked_during_the_step_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = StepRecorder(1, tmp_path / "run.json", force=False)
    recorder.resume(Net())
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        recorder.close()
    assert list(tmp_path.iterdir()) == []
    recorder.close()
    assert "training ended during step 1" in load(tmp_path / "run.json").gaps[0].fact


def test_giving_up_releases_even_a_trace_that_fails_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = StepRecorder(1, tmp_path / "run.json", force=False)
    recorder.resume(Net())
    end = Trace.__exit__

    def fail(self: Trace, *args: object) -> None:
        end(self, None, None, None)
        raise RuntimeError("cannot end")

    monkeypatch.setattr(Trace, "__exit__", fail)
    with (
        pytest.warns(UserWarning, match="step 1 is not recorded; training continues: OSError"),
        pytest.raises(RuntimeError, match="cannot end"),
    ):
        recorder.give_up(OSError())
    assert not recorder.is_recording
