"""A stream of limited size keeps its newest lines, counts the others, and survives being killed."""

from __future__ import annotations

import gc
import os
import stat
import tracemalloc
from pathlib import Path

import pytest
from msgspec.structs import replace

from shardscope.record import (
    Call,
    Collective,
    CollectiveKind,
    Gap,
    Group,
    Module,
    Phase,
    RankProcess,
    RankSpan,
    RunInfo,
    Span,
    SpanBegin,
    load,
    merge_files,
)
from shardscope.record.stream import CallTemplate, StreamWriter

RUN = RunInfo(torch_version="2", shardscope_version="1", world_size=2, ranks=(RankSpan(0),))
GROUP = Group(name="dp[0-1]", torch_name="0", ranks=(RankSpan(0, 1),), num_ranks=2, axis="dp")
MODULE = Module(name="layer", type="Linear", ranks=(RankSpan(0),))
PROCESS = RankProcess(rank=0, host="host-3", pid=77, started_unix_ns=1_000)
GAP = Gap(place="layer", fact="was not understood", rank=0)
MAX_BYTES = 4096
K = CollectiveKind


def make_call(kind: CollectiveKind = K.ALL_REDUCE, peer: int | None = None) -> Collective:
    return Collective(
        rank=0,
        order=0,
        group="dp[0-1]",
        group_order=0,
        kind=kind,
        op=f"c10d.{kind}_",
        num_ranks=2,
        axis="dp",
        dtype="float32",
        num_tensors=1,
        input_bytes=8,
        output_bytes=8,
        wire_bytes=8,
        phase=Phase.FORWARD,
        owner="layer",
        trigger="layer",
        cause=Call(api="torch.distributed.all_reduce"),
        peer=peer,
    )


def open_writer(path: Path, max_bytes: int | None = MAX_BYTES) -> StreamWriter:
    writer = StreamWriter(path, RUN, max_bytes=max_bytes)
    for record in (GROUP, MODULE, PROCESS, GAP):
        writer.write(record)
    return writer


def write_calls(
    writer: StreamWriter, num_calls: int, *calls: Collective, num_bytes: int = 8
) -> None:
    """Write calls in turn, every third with other sizes."""
    templates = [CallTemplate(call) for call in calls or (make_call(),)]
    for number in range(num_calls):
        size = num_bytes * (1 + number % 3 // 2)
        template = templates[number % len(templates)]
        writer.write_call(template, 100 * number, (size, size, size))
        writer.write_returned(number, 100 * number + 50, is_urgent=False)


def list_sizes(path: Path, num_calls: int) -> list[int]:
    writer, sizes = open_writer(path), []
    template = CallTemplate(make_call())
    for number in range(num_calls):
        writer.write_call(template, number, (8, 8, 8))
        sizes.append(path.stat().st_size)
    return sizes


def test_the_newest_calls_are_kept_and_the_others_counted(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    writer = open_writer(path)
    write_calls(writer, 1000)
    writer.close()
    recording = load(path)
    orders = [call.order for call in recording.collectives]
    assert orders == list(range(orders[0], 1000))
    (dropped,) = recording.dropped
    assert (dropped.group, dropped.kind, dropped.rank, dropped.peer) == (
        "dp[0-1]",
        K.ALL_REDUCE,
        0,
        None,
    )
    assert dropped.num_collectives == orders[0] > 500
    assert dropped.input_bytes == sum(8 * (1 + number % 3 // 2) for number in range(orders[0]))
    assert recording.stops == ()
    (gap,) = (gap for gap in recording.gaps if gap.place == "stream")
    assert not gap.is_loss
    assert gap.fact == (
        f"only the newest records were kept: {orders[0]:,} collectives (dp[0-1] {orders[0]:,}) "
        "before them were dropped, as the size of the stream was limited"
    )


def test_the_file_stays_within_its_limit(tmp_path: Path) -> None:
    sizes = list_sizes(tmp_path / "run.jsonl", 2000)
    lasting = 1000  # header, group, module, process, gap
    assert max(sizes) <= MAX_BYTES + lasting
    assert min(sizes[1000:]) >= MAX_BYTES // 2
    assert os.listdir(tmp_path) == ["run.jsonl"]


def test_what_is_kept_is_what_an_unlimited_stream_has(tmp_path: Path) -> None:
    calls = make_call(), make_call(K.BROADCAST, peer=1), make_call(K.BARRIER)
    recordings = []
    for name, max_bytes in (("all", None), ("limited", MAX_BYTES)):
        writer = open_writer(tmp_path / name, max_bytes)
        write_calls(writer, 1000, *calls)
        writer.close()
        recordings.append(load(tmp_path / name))
    every, newest = recordings
    assert len(every.collectives) == 1000
    assert newest.collectives == every.collectives[-len(newest.collectives) :]
    assert all(call.returned_ns is not None for call in every.collectives)
    assert (newest.groups, newest.modules, newest.processes) == ((GROUP,), (MODULE,), (PROCESS,))
    assert newest.gaps[0] == GAP
    assert every.gaps == (GAP,)
    assert newest.dropped
    assert every.dropped == ()


def test_dropped_sends_and_receives_are_counted_by_their_peer(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "run.jsonl")
    write_calls(writer, 900, make_call(K.SEND, peer=1), make_call(K.RECV), make_call())
    writer.close()
    recording = load(tmp_path / "run.jsonl")
    counts = {(record.kind, record.peer): record.num_collectives for record in recording.dropped}
    assert counts.keys() == {(K.SEND, 1), (K.RECV, None), (K.ALL_REDUCE, None)}
    assert sum(counts.values()) + len(recording.collectives) == 900


def test_open_phases_and_dropped_spans_are_known_after_their_lines_are_gone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.jsonl"
    writer = open_writer(path)
    writer.write_begin(SpanBegin(rank=0, name="epoch", start_ns=1, thread=""))
    for number in range(200):
        span = Span(rank=0, name="step", start_ns=10 * number, duration_ns=5, self_ns=5, thread="")
        writer.write(span)
    recording = load(path)
    (stop,) = recording.stops
    assert [begin.name for begin in stop.open_spans] == ["epoch"]
    (fact,) = (gap.fact for gap in recording.gaps if gap.place == "stream")
    assert f"{200 - len(recording.spans)} spans before them were dropped" in fact
    writer.close()
    assert load(path).stops == ()


def test_a_rank_that_becomes_known_is_that_of_what_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    writer = open_writer(path)
    writer.write_run(replace(RUN, ranks=(RankSpan(1),)))
    write_calls(writer, 500, replace(make_call(), rank=1))
    writer.close()
    recording = load(path)
    assert recording.run.ranks == (RankSpan(1),)
    assert recording.modules == (replace(MODULE, ranks=(RankSpan(1),)),)
    assert recording.processes == (replace(PROCESS, rank=1),)
    assert {record.rank for record in recording.dropped} == {1}


def test_a_stream_that_ends_at_any_byte_has_the_calls_before_it(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    writer = open_writer(path)
    write_calls(writer, 300)
    data, complete = path.read_bytes(), load(path)
    header_end = data.index(b"\n") + 1
    torn = tmp_path / "torn.jsonl"
    num_calls = []
    for end in range(header_end, len(data), 7):
        torn.write_bytes(data[:end])
        recording = load(torn)
        num_calls.append(len(recording.collectives))
        kept = [replace(call, returned_ns=None) for call in recording.collectives]
        expected = [replace(call, returned_ns=None) for call in complete.collectives]
        assert kept == expected[: len(kept)]
        assert len(recording.stops) == 1
        assert recording.gaps
    assert num_calls == sorted(num_calls)
    assert num_calls[-1] >= len(complete.collectives) - 1


def test_a_file_that_a_killed_process_left_half_made_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".run.jsonl.next").write_bytes(b"half a li")
    writer = open_writer(tmp_path / "run.jsonl")
    write_calls(writer, 500)
    writer.close()
    assert os.listdir(tmp_path) == ["run.jsonl"]
    assert load(tmp_path / "run.jsonl").dropped


def test_the_mode_of_the_file_and_links_to_it_are_kept(tmp_path: Path) -> None:
    target = tmp_path / "scratch" / "run.jsonl"
    target.parent.mkdir()
    target.touch(mode=0o600)
    link = tmp_path / "run.jsonl"
    link.symlink_to(target)
    writer = StreamWriter(link, RUN, force=True, max_bytes=MAX_BYTES)
    write_calls(writer, 500)
    writer.close()
    assert link.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert load(link).collectives[-1].order == 499


def test_a_folder_that_allows_no_new_file_ends_the_stream_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    writer = open_writer(path)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("shardscope.record.append_file.os.replace", refuse)
    write_calls(writer, 500)
    assert writer.failure is not None
    assert "Permission denied" in writer.failure
    assert load(path).collectives
    assert os.listdir(tmp_path) == ["run.jsonl"]


def test_streams_of_limited_size_are_merged(tmp_path: Path) -> None:
    for rank in range(2):
        run = replace(RUN, ranks=(RankSpan(rank),))
        writer = StreamWriter(tmp_path / f"{rank}.jsonl", run, max_bytes=MAX_BYTES)
        writer.write(GROUP)
        write_calls(writer, 400 + 100 * rank, replace(make_call(), rank=rank))
        writer.close()
    merged = merge_files([tmp_path / "0.jsonl", tmp_path / "1.jsonl"])
    dropped = {record.rank: record.num_collectives for record in merged.dropped}
    kept = [sum(call.rank == rank for call in merged.collectives) for rank in range(2)]
    assert [dropped[rank] + kept[rank] for rank in range(2)] == [400, 500]


def test_memory_does_not_grow_with_the_calls(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "run.jsonl", 64 * 1024)
    write_calls(writer, 4000)
    gc.collect()
    num_objects = len(gc.get_objects())
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        write_calls(writer, 20_000)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(gc.get_objects()) - num_objects < 100
    assert after - before < 64 * 1024
    assert (tmp_path / "run.jsonl").stat().st_size < 80 * 1024
