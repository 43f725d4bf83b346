"""With `stream_bytes`, a trace keeps its newest records in a file, and none in memory."""

from __future__ import annotations

import gc
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardscope import World, load, phases, trace
from shardscope.errors import TraceError
from small_models import Net, batch
from warm_python import run_python

pytestmark = pytest.mark.usefixtures("host_clock_only")
LIMIT = 64 * 1024


def test_recording_has_what_the_stream_has_kept(world: World, tmp_path: Path) -> None:
    net = Net()
    with trace(net, stream=tmp_path / "run.jsonl", stream_bytes=LIMIT) as t:
        for _ in range(900):
            net(batch()).sum().backward()
        inside = t.recording
    recording = t.recording
    assert recording.collectives == load(tmp_path / "run.jsonl").collectives
    assert recording.collectives[-100:] == inside.collectives[-100:]
    assert [call.order for call in recording.collectives[-2:]] == [3598, 3599]
    num_dropped = sum(record.num_collectives for record in recording.dropped)
    assert num_dropped == recording.collectives[0].order > 0
    assert {call.owner for call in recording.collectives} == {"layers.0.sum", "layers.1.sum"}
    (gap,) = recording.gaps
    assert gap.fact.startswith(f"only the newest records were kept: {num_dropped:,} collectives")


def test_memory_does_not_grow_with_the_steps(world: World, tmp_path: Path) -> None:
    net = Net()
    with trace(net, stream=tmp_path / "run.jsonl", stream_bytes=LIMIT), torch.no_grad():
        for _ in range(300):
            net(batch())
        gc.collect()
        num_objects = len(gc.get_objects())
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(500):
                with phases("step"):
                    net(batch())
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(gc.get_objects()) - num_objects < 200
    assert after - before < 192 * 1024  # marks of module calls and the world's counters
    assert (tmp_path / "run.jsonl").stat().st_size < LIMIT + 16 * 1024
    assert os.listdir(tmp_path) == ["run.jsonl"]


@pytest.mark.parametrize("stream_bytes", [0, -1, 1000, 1e6, "64 MiB", True])
def test_limits_that_cannot_be_are_refused(tmp_path: Path, stream_bytes: Any) -> None:
    with pytest.raises(TraceError, match=r"which cannot be the size of a stream\. Give 65,536"):
        trace(stream=tmp_path / "run.jsonl", stream_bytes=stream_bytes)


def test_a_limit_without_a_stream_is_refused() -> None:
    with pytest.raises(TraceError, match=r"got stream_bytes, but no stream\. Name a file, too"):
        trace(stream_bytes=LIMIT)


_RETURNS = """
import os, sys
import torch, torch.distributed as dist
from shardscope import trace

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
x = torch.ones(4)
for stream in (None, sys.argv[1]):
    with trace(stream=stream) as t:
        dist.all_reduce(x)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        dist.barrier()
        dist.all_gather_object([None], {"a": 1})
    calls = t.recording.collectives
    assert len(calls) >= 4
    for call, later in zip(calls, [*calls[1:], None]):
        assert call.start_ns <= call.returned_ns, call
        assert later is None or call.returned_ns <= later.start_ns, call
    (process,) = t.recording.processes
    assert process.pid == os.getpid() and process.host
    assert process.started_unix_ns > 10**18
print("done")
"""


def test_calls_of_a_process_group_have_the_time_of_their_return(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_RETURNS)
    ended = run_python(program, tmp_path / "run.jsonl")
    assert ended.stdout == "done\n", ended.stderr
    streamed = load(tmp_path / "run.jsonl")
    assert all(call.returned_ns is not None for call in streamed.collectives)
    assert len(streamed.processes) == 1


def test_a_simulated_rank_has_no_process_and_no_times(world: World, tmp_path: Path) -> None:
    with trace(stream=tmp_path / "run.jsonl") as t:
        dist.all_reduce(torch.ones(2))
    (call,) = t.recording.collectives
    assert (call.start_ns, call.returned_ns) == (None, None)
    assert t.recording.processes == load(tmp_path / "run.jsonl").processes == ()
