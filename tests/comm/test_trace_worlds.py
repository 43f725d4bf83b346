"""Worlds and groups that begin, end or change while a trace is open."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from shardscope import load, phases, simulate, trace
from shardscope.errors import TraceError
from shardscope.record import RankSpan, merge
from shardscope.report.text.summary import render_text
from small_models import Block, batch, facts
from warm_python import Program

pytestmark = pytest.mark.usefixtures("host_clock_only")


def test_group_destroyed_inside_the_trace_keeps_its_collectives() -> None:
    with simulate({"dp": 2, "tp": 4}, rank=5), trace() as t:
        group = dist.new_group([4, 5])
        dist.all_reduce(torch.ones(2), group=group)
        dist.broadcast(torch.ones(2), src=4, group=group)
        dist.destroy_process_group(group)
    assert facts(t, "kind", "group", "num_ranks", "peer", "wire_bytes") == [
        ("all_reduce", "group[4-5]", 2, None, 8),
        ("broadcast", "group[4-5]", 2, 4, 8),
    ]
    assert t.recording.gaps == ()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_recording_says_which_device_a_simulation_stands_for(device: str) -> None:
    with simulate({"dp": 2}, device=device), trace() as t:
        dist.all_reduce(torch.ones(2))
    assert t.recording.run.device_type == device
    assert f"· simulated ({device}) ·" in render_text(t.recording)
    recording = replace(
        t.recording, run=replace(t.recording.run, device_type=None, ranks=(RankSpan(1),))
    )
    calls = tuple(replace(call, rank=1) for call in recording.collectives)
    merged = merge([replace(recording, collectives=calls), t.recording])
    assert merged.run.device_type == device


def test_without_a_world_the_device_is_not_known() -> None:
    with trace() as t:
        pass
    assert t.recording.run.device_type is None
    assert "simulated" not in render_text(t.recording)


def test_world_destroyed_inside_the_trace_keeps_its_collectives() -> None:
    with simulate({"dp": 4}), trace() as t:
        dist.all_gather([torch.ones(2) for _ in range(4)], torch.ones(2))
        dist.destroy_process_group()
    assert facts(t, "group", "output_bytes") == [("dp[0-3]", 32)]
    assert t.recording.gaps == ()


def test_trace_may_outlive_the_world(tmp_path: Path) -> None:
    model = Block()
    with trace(model) as t, simulate({"dp": 8}, rank=7):
        model(batch()).sum().backward()
    assert facts(t, "rank", "group", "owner") == [(7, "dp[0-7]", "sum")] * 2
    run = t.recording.run
    assert (run.world_size, run.ranks, run.is_simulated) == (8, (RankSpan(7),), True)
    assert {module.ranks for module in t.recording.modules} == {(RankSpan(7),)}
    assert [axis.name for axis in run.axes] == ["dp"]
    assert load(t.save(tmp_path / "run.json")) == t.recording


def test_stream_of_a_trace_that_began_before_the_world_is_this_ranks(tmp_path: Path) -> None:
    with (
        trace(Block(), stream=tmp_path / "{rank}.jsonl") as t,
        simulate({"dp": 8}, rank=3),
    ):
        dist.barrier()
    assert os.listdir(tmp_path) == ["3.jsonl"]
    assert load(tmp_path / "3.jsonl") == t.recording
    assert len(t.recording.modules) == 3


def test_stream_without_a_rank_in_its_name_learns_whose_it_is(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with trace(Block(), stream=path) as t:
        with phases("early"):
            pass
        assert load(path).run.world_size == 1
        with simulate({"dp": 8}, rank=3):
            dist.barrier()
            assert load(path).run == t.recording.run
    assert load(path) == t.recording
    assert (t.recording.spans[0].rank, t.recording.run.world_size) == (3, 8)


def test_stream_moves_to_the_name_of_a_rank_that_is_known_when_entered_again(
    tmp_path: Path,
) -> None:
    t = trace(Block(), stream=tmp_path / "{rank}.jsonl")
    with t, phases("early"):
        pass
    assert os.listdir(tmp_path) == ["0.jsonl"]
    with t, simulate({"dp": 8}, rank=3):
        dist.barrier()
    assert os.listdir(tmp_path) == ["3.jsonl"]
    assert load(tmp_path / "3.jsonl") == t.recording


@pytest.mark.parametrize("name", ["{rank}.jsonl", "run.jsonl"])
def test_ranks_forked_inside_the_trace_write_their_own_streams(tmp_path: Path, name: str) -> None:
    with trace(stream=tmp_path / name, force=True) as t:
        with phases("early"):
            pass
        child = os.fork()
        if child == 0:
            with simulate({"dp": 8}, rank=3):
                dist.barrier()
            os._exit(0 if bool(t.recording.gaps) == (name == "run.jsonl") else 1)
        assert os.waitpid(child, 0)[1] == 0
    own = load(tmp_path / name.replace("{rank}", "0"))
    assert [span.rank for span in own.spans] == [0]
    assert (own.collectives, own.gaps) == ((), ())
    if name != "run.jsonl":
        (span,) = load(tmp_path / "3.jsonl").spans
        assert (span.name, span.rank) == ("early", 3)
        assert len(load(tmp_path / "3.jsonl").collectives) == 1


def test_stream_of_a_trace_without_any_world_is_there_all_the_same(tmp_path: Path) -> None:
    with trace(model := Block(), stream=tmp_path / "{rank}.jsonl") as t:
        model.linear(batch())
    assert load(tmp_path / "0.jsonl") == t.recording


def test_stream_that_cannot_be_opened_late_is_a_gap(tmp_path: Path) -> None:
    (tmp_path / "3.jsonl").write_text("precious")
    with trace(stream=tmp_path / "{rank}.jsonl") as t, simulate({"dp": 8}, rank=3):
        dist.barrier()
    assert len(t.recording.collectives) == 1
    (gap,) = t.recording.gaps
    assert gap.place == "stream"
    assert "already exists" in gap.fact
    assert (tmp_path / "3.jsonl").read_text() == "precious"


def test_rank_is_known_from_the_launcher_before_there_is_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with trace() as t:
        pass
    assert (t.recording.run.world_size, t.recording.run.ranks) == (4, (RankSpan(2),))


def test_entering_a_trace_again_in_another_world_is_refused() -> None:
    t = trace()
    with simulate({"dp": 2}), t:
        dist.barrier()
    with (
        simulate({"dp": 8}, rank=3),
        pytest.raises(TraceError, match=r"rank 0 of 2 and is entered again as rank 3 of 8\. Make"),
        t,
    ):
        raise AssertionError("not reached")
    assert len(t.recording.collectives) == 1


def test_another_world_inside_one_trace_is_a_gap(tmp_path: Path) -> None:
    with trace() as t:
        with simulate({"dp": 2}):
            dist.barrier()
        with simulate({"dp": 8}, rank=3):
            dist.barrier()
            dist.barrier()
        with simulate({"dp": 2}):
            dist.barrier()
    assert facts(t, "rank", "group", "group_order") == [(0, "dp[0-1]", 0), (0, "dp[0-1]", 1)]
    (gap,) = t.recording.gaps
    assert gap.place == "world"
    assert "changed to rank 3 of 8" in gap.fact
    assert len(t.recording.groups) == 1
    assert load(t.save(tmp_path / "run.json")) == t.recording


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_groups_of_the_same_ranks_are_numbered_as_they_were_made(order: tuple[int, int]) -> None:
    with simulate({"dp": 4}), trace() as t:
        fake_map = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        for index in order:
            dist.all_reduce(torch.ones(index + 1), group=fake_map[index])
    names = dict(facts(t, "input_bytes", "group"))
    assert names == {4: "group[0-1]", 8: "group[0-1]#2"}


def test_trace_around_an_entire_program_sees_its_group_come_and_go(tmp_path: Path) -> None:
    program = """
        import sys
        import torch
        import torch.distributed as dist
        from shardscope import load, trace

        rank, folder = int(sys.argv[1]), sys.argv[2]

        def main():
            dist.init_process_group(
                "gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2
            )
            dist.all_reduce(torch.ones(3))
            dist.destroy_process_group()

        with trace(stream=folder + "/{rank}.jsonl") as t:
            main()
        assert load(f"{folder}/{rank}.jsonl") == t.recording, t.recording
        (call,) = t.recording.collectives
        print(call.rank, call.group, t.recording.run.world_size, t.recording.gaps)
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    ranks = [Program(tmp_path / "program.py", str(rank), tmp_path) for rank in range(2)]
    outputs = [rank.wait().stdout.strip() for rank in ranks]
    assert outputs == ["0 world[0-1] 2 ()", "1 world[0-1] 2 ()"]
