"""The event file is read by TensorBoard's own reader, and has the values of the recording."""

from __future__ import annotations

from math import isclose
from pathlib import Path

import pytest
from msgspec.structs import replace

from sample_recordings import (
    make_collective,
    make_explained,
    make_holdings,
    make_llama,
    make_recording,
)
from shardscope.record import CollectiveKind, Phase, Recording
from shardscope.report.export.metrics import list_scalars
from shardscope.report.export.tensorboard import render_tensorboard

events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def read(folder: Path, recording: Recording, *, step: int = 0) -> dict[str, tuple[int, float]]:
    """Step and value of each scalar, as TensorBoard sees them."""
    path = folder / "run.tfevents"
    path.write_bytes(b"".join(render_tensorboard(recording, step=step)))
    reader = events.EventAccumulator(str(path))
    reader.Reload()
    scalars = {}
    for tag in reader.Tags()["scalars"]:
        (event,) = reader.Scalars(tag)
        scalars[tag] = (event.step, event.value)
    return scalars


def test_tensorboard_reads_every_scalar_of_any_recording(
    tmp_path: Path, any_recording: Recording
) -> None:
    scalars = read(tmp_path, any_recording, step=2**40)
    expected = list_scalars(any_recording)
    assert "findings/error" in expected
    assert list(scalars) == list(expected)
    for tag, (step, value) in scalars.items():
        assert step == 2**40
        assert isclose(value, expected[tag], rel_tol=1e-6)  # TensorBoard keeps 32 bits
    same = b"".join(render_tensorboard(any_recording, step=2**40))
    assert (tmp_path / "run.tfevents").read_bytes() == same


def test_a_damaged_file_is_noticed_by_its_checksum(tmp_path: Path) -> None:
    data = b"".join(render_tensorboard(make_llama(num_layers=1)))
    for place in (3, 20, len(data) // 2, len(data) - 2):
        damaged = bytearray(data)
        damaged[place] ^= 1
        path = tmp_path / f"{place}.tfevents"
        path.write_bytes(damaged)
        reader = events.EventAccumulator(str(path))
        reader.Reload()  # it stops where something is wrong
        assert reader.Tags()["scalars"] == []


def test_communication_scalars_are_of_one_rank_and_add_up() -> None:
    calls = (
        make_collective(axis="tp", wire_bytes=100, input_bytes=10),
        make_collective(order=1, axis="dp", wire_bytes=40, kind=CollectiveKind.ALL_GATHER),
        make_collective(rank=1, axis="tp", wire_bytes=300, phase=Phase.BACKWARD),
    )
    scalars = list_scalars(make_recording(calls))
    assert scalars["comm/count"] == 1.5
    assert scalars["comm/wire_bytes"] == 220
    assert scalars["comm_by_axis/tp/wire_bytes"] == 200
    assert scalars["comm_by_axis/dp/count"] == 0.5
    assert scalars["comm_by_kind/all_reduce/count"] == 1
    assert scalars["comm_by_phase/backward/wire_bytes"] == 150
    for part in ("axis", "kind", "phase"):
        values = [n for tag, n in scalars.items() if tag.startswith(f"comm_by_{part}/")]
        assert sum(values) == sum(n for tag, n in scalars.items() if tag.startswith("comm/"))


def test_a_step_without_collectives_has_a_scalar_and_an_untraced_step_has_none() -> None:
    silent = make_recording()
    traced = replace(silent, run=replace(silent.run, instruments=("trace",)))
    assert list_scalars(traced)["comm/count"] == 0
    assert "comm/count" not in list_scalars(silent)


def test_memory_coverage_and_graph_breaks_have_scalars() -> None:
    recording = make_holdings()
    scalars = list_scalars(recording)
    most = max(recording.memory, key=lambda profile: profile.peak_bytes)
    assert scalars["memory/peak_bytes"] == most.peak_bytes
    at_peak = sum(n for tag, n in scalars.items() if tag.startswith("memory_at_peak/"))
    assert at_peak == sum(use.num_bytes for use in most.at_peak) > 0
    for coverage in recording.coverage:
        values = [n for tag, n in scalars.items() if tag.startswith(f"coverage/{coverage.level}/")]
        assert sum(values) == len(coverage.ops) > 0
    explained = make_explained()
    most_breaks = max(explanation.num_break_sites for explanation in explained.explanations)
    assert list_scalars(explained)["compiler/graph_breaks"] == most_breaks > 0
