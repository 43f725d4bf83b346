"""With `stream=`, events are on disk as they happen, and survive a rank that is killed."""

from __future__ import annotations

import itertools
import os
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardscope import World, load, phases, simulate, trace
from shardscope.errors import OutputError
from small_models import Net, batch, facts, shard_net
from warm_python import Program, run_python

pytestmark = pytest.mark.usefixtures("host_clock_only")
TESTS = Path(__file__).parents[1]


@pytest.fixture
def world() -> Iterator[World]:
    with simulate({"dp": 4}, rank=2) as world:
        yield world


def test_each_event_is_readable_as_soon_as_it_has_happened(world: World, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with trace(stream=path):
        assert load(path).collectives == ()
        for number in range(1, 4):
            dist.all_reduce(torch.ones(number))
            so_far = load(path)
            assert [call.input_bytes for call in so_far.collectives] == [
                4 * (n + 1) for n in range(number)
            ]
            assert [group.name for group in so_far.groups] == ["dp[0-3]"]
            assert "still running" in so_far.gaps[0].fact
    assert load(path).gaps == ()


def test_collective_is_on_disk_before_it_is_issued(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    num_written: list[int] = []
    monkeypatch.setattr(
        "shardscope.world.checks.CollectiveChecker.amend",
        lambda self, event, result: (num_written.append(len(load(path).collectives)), result)[1],
    )
    with trace(stream=path):
        dist.all_reduce(torch.ones(1))
    assert num_written == [1]


def test_stream_holds_what_the_recording_holds(world: World, tmp_path: Path) -> None:
    net = shard_net(Net(), world.mesh)
    with trace(net, stream=tmp_path / "run.jsonl") as t:
        net(batch()).sum().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    streamed = load(tmp_path / "run.jsonl")
    assert streamed.run == t.recording.run
    assert streamed.collectives == t.recording.collectives
    assert streamed.groups == t.recording.groups
    assert streamed.modules == t.recording.modules
    assert streamed.gaps == t.recording.gaps == ()
    assert streamed == t.recording
    assert len(streamed.collectives) > 6


def test_streaming_changes_nothing_that_is_recorded(world: World, tmp_path: Path) -> None:
    net = Net()
    recorded = []
    for path in (None, tmp_path / "run.jsonl"):
        with trace(net, stream=path) as t:
            net(batch()).sum().backward()
        recorded.append(facts(t, "order", "kind", "phase", "owner", "trigger", "cause", "source"))
    assert recorded[0] == recorded[1]


def test_gap_of_a_failed_step_is_in_the_stream(world: World, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), trace(stream=tmp_path / "run.jsonl"):
        raise ZeroDivisionError("boom")
    (gap,) = load(tmp_path / "run.jsonl").gaps
    assert gap.fact == "it ended early with ZeroDivisionError: boom"


def test_modules_met_on_the_way_are_in_the_stream(world: World, tmp_path: Path) -> None:
    net = Net(depth=1)
    with trace(stream=tmp_path / "run.jsonl") as t:
        net(batch())
    assert load(tmp_path / "run.jsonl").modules == t.recording.modules
    assert [module.name for module in t.recording.modules][:2] == ["Net", "Net.embed"]


def test_rank_in_the_path_is_this_rank(world: World, tmp_path: Path) -> None:
    with trace(stream=str(tmp_path / "run-{rank}.jsonl")) as t:
        dist.barrier()
    assert load(tmp_path / "run-2.jsonl").collectives == t.recording.collectives
    assert t.save(tmp_path / "saved-{rank}.json") == tmp_path / "saved-2.json"
    assert load(tmp_path / "saved-2.json") == t.recording


def test_existing_file_is_refused_before_anything_happens(world: World, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("precious")
    call = torch.nn.Module.__call__
    with pytest.raises(OutputError, match="force"), trace(stream=path):
        raise AssertionError("not reached")
    assert path.read_text() == "precious"
    assert torch.nn.Module.__call__ is call


def test_existing_file_is_replaced_with_force(world: World, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("old")
    with trace(stream=path, force=True) as t:
        dist.barrier()
    assert load(path).collectives == t.recording.collectives


def test_stream_may_be_entered_again(world: World, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    t = trace(stream=path)
    for _ in range(3):
        with t:
            dist.barrier()
        assert load(path).gaps == ()
    streamed = load(path)
    assert len(t.recording.collectives) == 3
    assert streamed.collectives == t.recording.collectives
    assert streamed.gaps == ()


def test_stream_entered_again_and_not_ended_says_so(world: World, tmp_path: Path) -> None:
    t = trace(stream=tmp_path / "run.jsonl")
    with t:
        dist.barrier()
    with t:
        dist.barrier()
        (gap,) = load(tmp_path / "run.jsonl").gaps
    assert "still running" in gap.fact


def test_stream_deleted_between_two_uses_is_a_gap(world: World, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    t = trace(stream=path)
    with t:
        dist.barrier()
    path.unlink()
    with t:
        dist.barrier()
    assert len(t.recording.collectives) == 2
    assert [gap.place for gap in t.recording.gaps] == ["stream"]
    assert "stops after 2 records: No such file or directory" in t.recording.gaps[0].fact


KILLED = """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    import torch, torch.distributed as dist
    from shardscope import simulate, trace
    from small_models import Net, batch

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    with simulate({{"dp": 4}}, rank=1), trace(net := Net(), stream={path!r}):
        net(batch()).sum().backward()
        {deadly}
"""

DEADLY = {
    "between collectives": ("kill()", 4),
    "in a module": (
        "net.embed.register_forward_hook(lambda *_: kill()); dist.barrier(); net(batch())",
        5,
    ),
    # It dies in the kernel, where a rank that hangs would be: the collective is there already.
    "inside a collective": (
        "from shardscope.world.checks import CollectiveChecker as C; "
        "C.amend = lambda *_: kill(); dist.barrier()",
        5,
    ),
}


@pytest.mark.parametrize("name", DEADLY)
def test_killed_rank_leaves_a_readable_recording(tmp_path: Path, name: str) -> None:
    deadly, num_collectives = DEADLY[name]
    path = tmp_path / "run.jsonl"
    program = textwrap.dedent(KILLED).format(tests=str(TESTS), path=str(path), deadly=deadly)
    ended = run_python("-c", program)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    recording = load(path)
    assert len(recording.collectives) == num_collectives
    assert [call.owner for call in recording.collectives[:4]] == [
        "layers.0.sum",
        "layers.1.sum",
        "layers.1.sum",
        "layers.0.sum",
    ]
    assert [module.name for module in recording.modules][:2] == ["", "embed"]
    assert recording.run.ranks[0].first == 1
    (gap,) = recording.gaps
    assert "the run was killed, or is still running" in gap.fact


UNLAUNCHED = """
    import os, signal
    from shardscope import phases, trace

    with trace(stream={path!r}):
        for _ in range(3):
            with phases("load"):
                pass
        os.kill(os.getpid(), signal.SIGKILL)
"""


STUCK = """
    import os, signal, threading
    from shardscope import phases, trace

    reached = threading.Event()

    def fetch():
        with phases("fetch"), phases("decode"):
            reached.set()
            threading.Event().wait()

    with trace(stream={path!r}):
        threading.Thread(target=fetch, name="loader", daemon=True).start()
        reached.wait()
        with phases("step"):
            for _ in range(2):
                with phases("load"):
                    pass
            with phases("forward"), phases("load"), phases("forward"):
                os.kill(os.getpid(), signal.SIGKILL)
"""


def test_stream_of_a_killed_rank_has_its_open_phases(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    program = textwrap.dedent(STUCK).format(path=str(path))
    ended = run_python("-c", program)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    recording = load(path)
    assert [span.name for span in recording.spans] == ["load", "load"]
    end, stuck = recording.gaps
    assert "the run was killed" in end.fact
    assert (stuck.place, stuck.rank) == ("phases", 0)
    assert stuck.fact == (
        "still open where the stream stops, outermost first: "
        "step > forward > load > forward; fetch > decode (thread loader)"
    )


def test_phases_that_outlive_the_trace_are_not_what_it_hangs_in(tmp_path: Path) -> None:
    t, outer = trace(stream=tmp_path / "run.jsonl"), phases("outer")
    with t:
        outer.__enter__()
    assert load(tmp_path / "run.jsonl").gaps == ()
    outer.__exit__(None, None, None)
    with t, phases("inner"):
        _, stuck = load(tmp_path / "run.jsonl").gaps
    assert stuck.fact.endswith("first: inner")
    assert load(tmp_path / "run.jsonl") == t.recording


@pytest.mark.parametrize("name", ["run.jsonl", "run-{rank}.jsonl"])
def test_killed_process_without_a_process_group_leaves_a_readable_recording(
    tmp_path: Path, name: str
) -> None:
    program = textwrap.dedent(UNLAUNCHED).format(path=str(tmp_path / name))
    process = Program("-c", program)
    assert process.wait().returncode == -signal.SIGKILL
    path = tmp_path / name.replace("{rank}", f"pid{process.pid}")
    assert [span.name for span in load(path).spans] == ["load"] * 3


def test_stream_that_has_no_rank_yet_keeps_out_of_the_way_of_others(tmp_path: Path) -> None:
    pattern, number = str(tmp_path / "{rank}.jsonl"), os.getpid()
    (tmp_path / f"pid{number}.jsonl").write_text("of another machine")
    with trace(stream=pattern, force=True), phases("a"):
        assert sorted(os.listdir(tmp_path)) == [f"pid{number}-1.jsonl", f"pid{number}.jsonl"]
    assert (tmp_path / f"pid{number}.jsonl").read_text() == "of another machine"
    assert len(load(tmp_path / "0.jsonl").spans) == 1


def test_stream_whose_name_is_taken_in_the_end_stays_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text("precious")
    with trace(stream=tmp_path / "{rank}.jsonl") as t, phases("a"):
        pass
    unnamed = tmp_path / f"pid{os.getpid()}.jsonl"
    assert (tmp_path / "0.jsonl").read_text() == "precious"
    assert load(unnamed).spans == t.recording.spans
    (gap,) = load(unnamed).gaps
    assert gap.fact.endswith(f"The stream stays in '{unnamed}'.")


def test_folders_of_ranks_need_not_be_there_for_processes(tmp_path: Path) -> None:
    (tmp_path / "rank-3").mkdir()
    with trace(stream=tmp_path / "rank-{rank}" / "run.jsonl") as t:
        assert os.path.isfile(tmp_path / f"pid{os.getpid()}-run.jsonl")
        with simulate({"dp": 4}, rank=3):
            dist.barrier()
    assert load(tmp_path / "rank-3" / "run.jsonl") == t.recording


def test_second_trace_that_would_write_the_same_stream_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    refused = pytest.raises(OutputError, match="already exists")
    with trace(stream=path), phases("a"), refused, trace(stream=path):
        raise NotImplementedError
    assert len(load(path).spans) == 1


CLOSED = """
    import os, torch.distributed as dist
    from shardscope import load, simulate, trace

    with simulate({"dp": 2}), trace(stream="run.jsonl") as t:
        dist.barrier()
        os.closerange(3, 4096)  # as daemons do
        mine = [os.open(f"mine-{number}", os.O_WRONLY | os.O_CREAT) for number in range(50)]
        dist.barrier()
    assert t.recording.gaps == (), t.recording.gaps
    assert len(load("run.jsonl").collectives) == 2
    assert load("run.jsonl").gaps == ()
    assert all(os.fstat(number).st_size == 0 for number in mine)
"""


def test_program_that_closes_all_descriptors_keeps_its_stream_and_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = run_python("-c", textwrap.dedent(CLOSED))
    assert ended.returncode == 0, ended.stderr


def test_clock_that_steps_back_gives_loadable_files(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count(10**12, -(10**9))
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(ticks))
    net = Net()
    with trace(net, stream=tmp_path / "run.jsonl") as t, phases("step"), phases("forward"):
        net(batch()).sum().backward()
    t.save(tmp_path / "run.json")
    saved, streamed = load(tmp_path / "run.json"), load(tmp_path / "run.jsonl")
    assert saved.collectives == streamed.collectives
    assert len(saved.spans) == len(streamed.spans) == 2
    assert streamed.stops == ()
    assert streamed.gaps == saved.gaps
    (gap,) = saved.gaps
    assert gap.fact == "the host's clock was set back during the trace: times after that are wrong"
    assert all(span.self_ns <= span.duration_ns for span in saved.spans)
