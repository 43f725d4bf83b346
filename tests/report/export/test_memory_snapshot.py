"""Torch's own viewer code reads the memory snapshots that we write."""

from __future__ import annotations

import pickle
import pickletools
from collections import Counter
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from msgspec.structs import replace
from torch.cuda import _memory_viz
from torch.distributed.fsdp import fully_shard

from memory_models import WEIGHT, backward, chain
from shardscope import memory, simulate
from shardscope.cli import main
from shardscope.record import MemoryKind, Recording, save
from shardscope.report.export.memory_snapshot import make_memory_snapshot


@pytest.fixture(scope="module")
def recording() -> Recording:
    """Three layers under FSDP2 with AdamW, whose buffers belong to several modules."""
    with simulate(mesh={"dp": 4}, device="cuda") as world:
        with torch.device("meta"):
            model = chain(3)
        fully_shard(model, mesh=world.mesh)
        world.materialize(model)
        optimizer = torch.optim.AdamW(model.parameters())
        return memory(model, backward(model), optimizer).recording


def test_the_rows_in_use_at_every_sample_sum_to_the_sample(recording) -> None:
    profile = recording.memory[0]
    table = profile.allocations
    assert profile.samples[0].order == table.first_order - 1
    for sample in profile.samples:
        sums = Counter()
        for start, end, num_bytes, kind in zip(
            table.start, table.end, table.num_bytes, table.kind, strict=True
        ):
            sums[kind] += num_bytes if start <= sample.order < end else 0
        assert tuple(sums[at] for at in range(len(MemoryKind))) == sample.num_bytes
    lines = {(source.file.rpartition("/")[2], source.text) for source in table.sources}
    assert ("memory_models.py", "return lambda: model(rows()).sum().backward()") in lines
    assert {table.modules[at] for at in table.module if at >= 0} >= {"0", "1", "2"}


def test_torch_reads_a_snapshot_with_the_peak_and_the_reserved_bytes(
    recording, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(recording, "run.json.gz")
    result = CliRunner().invoke(main, ["export", "run.json.gz", "--to", "memory-snapshot"])
    assert result.exit_code == 0, result.output
    data = Path("run.0.snapshot.pickle").read_bytes()
    opcodes = {opcode.name for opcode, _, _ in pickletools.genops(data)}
    assert not opcodes & {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "NEWOBJ"}  # only plain data
    snapshot = pickle.loads(data)
    profile = recording.memory[0]

    flames = _memory_viz.memory(snapshot, format_flamegraph=lambda text: text).splitlines()
    in_use = [line for line in flames if ";active_allocated;" in line]
    by_kind = Counter()
    for line in in_use:
        by_kind[line.split(";")[2].removeprefix("kind:0:")] += int(line.rpartition(" ")[2])
    last = profile.samples[-1].num_bytes
    expected = {str(kind): size for kind, size in zip(MemoryKind, last, strict=True) if size}
    assert by_kind == expected
    assert by_kind["parameters"] == 3 * WEIGHT // 4
    total = sum(int(line.rpartition(" ")[2]) for line in flames)
    assert total == profile.reserved_bytes
    reserved = _memory_viz.Bytes(profile.reserved_bytes)
    assert f"total_reserved: {reserved}\n" in _memory_viz.segsum(snapshot)

    in_use_now = sum(map(_memory_viz.calc_active, snapshot["segments"]))
    level = in_use_now  # the viewer goes back from the end to find what was there before
    levels = [level]
    for event in reversed(snapshot["device_traces"][0]):
        level += {"alloc": -1, "free_completed": 1}.get(event["action"], 0) * event["size"]
        levels.append(level)
    assert max(levels) == profile.peak_bytes
    assert levels[-1] == sum(profile.samples[0].num_bytes)

    assert "del " in _memory_viz.trace(snapshot)
    assert len(_memory_viz.trace_plot(snapshot)) > 1000
    kept = _memory_viz.filter_alloc_free_pairs(pickle.loads(pickle.dumps(snapshot)))
    assert not any(event["action"] == "free_completed" for event in kept["device_traces"][0])


def test_blocks_fill_their_segments_and_parts_of_a_buffer_are_one_block(recording) -> None:
    table = recording.memory[0].allocations
    snapshot = make_memory_snapshot(table)
    for segment in snapshot["segments"]:
        addresses = [block["address"] for block in segment["blocks"]]
        sizes = [block["size"] for block in segment["blocks"]]
        assert addresses[0] == segment["address"]
        assert sum(sizes) == segment["total_size"]
        assert all(
            before + size == after
            for before, size, after in zip(addresses, sizes, addresses[1:], strict=False)
        )
    starts = [event for event in snapshot["device_traces"][0] if event["action"] == "alloc"]
    assert len(starts) == len({start for start in table.start if start >= table.first_order})
    shared = [event for event in starts if ", " in event["frames"][-3]["name"]]
    assert shared[0]["frames"][-3] == {"filename": "module", "line": 0, "name": "0, 1, 2"}
    assert shared[0]["frames"][-1]["name"] in ("communication", "gathered")


def test_a_recording_without_allocations_names_the_remedy(recording, tmp_path) -> None:
    earlier = tuple(replace(profile, allocations=None) for profile in recording.memory)
    save(replace(recording, memory=earlier), tmp_path / "old.json")
    result = CliRunner().invoke(
        main, ["export", str(tmp_path / "old.json"), "--to", "memory-snapshot"]
    )
    assert result.exit_code == 2
    assert (
        "has no allocations to export. Export a recording of `shardscope memory`" in result.output
    )


def test_several_ranks_need_a_name_for_each(recording, tmp_path) -> None:
    profile = recording.memory[0]
    both = replace(recording, memory=(profile, replace(profile, rank=1)))
    save(both, tmp_path / "run.json")
    arguments = ["export", str(tmp_path / "run.json"), "--to", "memory-snapshot", "-o"]
    result = CliRunner().invoke(main, [*arguments, str(tmp_path / "snapshot.pickle")])
    assert result.exit_code == 2
    assert "2 ranks have a memory snapshot each" in result.output
    assert CliRunner().invoke(main, [*arguments, str(tmp_path / "{rank}.pickle")]).exit_code == 0
    assert (tmp_path / "0.pickle").read_bytes() == (tmp_path / "1.pickle").read_bytes()
