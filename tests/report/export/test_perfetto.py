"""The trace is what ui.perfetto.dev reads: processes, tracks, slices that do not overlap."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise

from msgspec.structs import replace

from sample_recordings import (
    make_collective,
    make_llama,
    make_phases,
    make_recording,
    make_span,
)
from shardscope.record import CollectiveKind, MemoryKind, MemoryProfile, MemorySample, Phase
from shardscope.report.export.perfetto import render_perfetto


def _events(recording, phase="X"):
    trace = json.loads(render_perfetto(recording))
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_every_collective_and_span_is_a_slice_and_bytes_repeat(any_recording):
    num_slices = len(any_recording.collectives) + len(any_recording.spans)
    assert len(_events(any_recording)) == num_slices
    assert render_perfetto(any_recording) == render_perfetto(any_recording)


# Other names of metadata are warned of by Chrome's viewer.
_NAMING = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def test_events_have_what_chromes_own_viewer_asks_for(any_recording):
    trace = json.loads(render_perfetto(any_recording))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    series = defaultdict(set)
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in _NAMING
            continue
        assert event["ph"] in ("X", "C")
        assert isinstance(event["cat"], str)
        assert isinstance(event["ts"], int | float)
        assert isinstance(event["args"], dict)
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
            series[event["pid"], event["name"]].add(tuple(event["args"]))
    assert all(len(names) == 1 for names in series.values())  # the first sample's hold for all


def _tracks(recording):
    tracks = defaultdict(list)
    for event in _events(recording):
        assert event["ts"] >= 0
        assert event["dur"] > 0
        tracks[event["pid"], event["tid"]].append(event)
    return tracks


def test_slices_of_a_track_never_overlap(any_recording):
    for events in _tracks(any_recording).values():
        if events[0]["cat"] == "phase":
            continue  # those lie within each other
        for before, after in pairwise(events):
            assert before["ts"] + before["dur"] <= after["ts"]


def _is_nested(events):
    """Whether each slice is nested in all slices that are open where it begins."""
    open_until = []
    for event in events:
        start, end = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
        while open_until and open_until[-1] <= start:
            open_until.pop()
        if open_until and end > open_until[-1]:
            return False
        open_until.append(end)
    return True


def test_phases_have_a_track_for_each_thread_and_clock_and_nest():
    recording = make_phases(ranks=(3,))
    tracks = _tracks(recording)
    names = {
        event["tid"]: event["args"]["name"]
        for event in _events(recording, "M")
        if event["name"] == "thread_name"
    }
    assert [names[tid] for _, tid in sorted(tracks)] == [
        "phases, loader",
        "phases, main thread",
        "phases, main thread, cuda:0",
    ]
    assert all(_is_nested(events) for events in tracks.values())
    step = next(events[0] for events in tracks.values() if events[0]["name"] == "step")
    assert step["dur"] == 13
    assert step["args"]["self_ns"] == 0


def test_phases_that_take_turns_get_tracks_of_their_own():
    spans = (
        make_span("a", 0, 10),
        make_span("b", 5, 10),
        make_span("in a", 2, 3, depth=1),
        make_span("in b", 12, 3, depth=1),
        make_span("c", 20, 5),
    )
    tracks = _tracks(make_recording(spans=spans))
    assert {tuple(event["name"] for event in events) for events in tracks.values()} == {
        ("a", "in a", "in b", "c"),
        ("b",),
    }
    assert all(_is_nested(events) for events in tracks.values())


def test_phases_and_collectives_of_a_rank_share_a_clock():
    calls = (
        make_collective(rank=0, start_ns=5_000_000),
        make_collective(rank=1, start_ns=70_000_000),
    )
    spans = (
        make_span("early", 4_000_000, rank=0),
        make_span("at it", 70_000_000, rank=1),
        make_span("alone", 9_000_000, rank=2),
    )
    recording = make_recording(calls, spans=spans, ranks=(0, 1, 2))
    starts = {(event["pid"], event["name"]): event["ts"] for event in _events(recording)}
    assert starts[0, "early"] == 0
    assert starts[0, "all_reduce"] == starts[1, "all_reduce"] == starts[1, "at it"] == 1000
    assert starts[2, "alone"] == 5000  # it met nobody, and keeps its own clock


def test_a_process_per_rank_and_a_track_per_axis():
    llama = make_llama(num_layers=1, dp=1, ranks=(0, 1))
    names = _events(replace(llama, run=replace(llama.run, is_simulated=False)), "M")
    processes = {e["pid"]: e["args"]["name"] for e in names if e["name"] == "process_name"}
    assert processes == {0: "rank 0", 1: "rank 1"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in names if e["name"] == "thread_name"}
    dp, tp = (f"{axis} (start times, durations not measured)" for axis in ("dp", "tp"))
    assert threads == {(0, 1): dp, (0, 2): tp, (1, 1): dp, (1, 2): tp}


def test_a_simulation_has_an_order_and_no_times(llama):
    spans = (make_span("step", 7_000, 5_000),)
    names = _events(replace(llama, spans=spans), "M")
    tracks = [name["args"]["name"] for name in names if name["name"] == "thread_name"]
    assert tracks == [
        "dp (simulated order, not time)",
        "tp (simulated order, not time)",
        "phases, main thread (time of the simulation, not of a run)",
    ]
    calls = [event for event in _events(llama) if event["cat"] != "phase"]
    assert [event["ts"] for event in calls] == [10 * number for number in range(len(calls))]
    assert "have no times, only an order" in json.loads(render_perfetto(llama))["otherData"]["note"]


def test_groups_without_an_axis_have_their_own_track():
    events = _events(make_recording((make_collective(group="pair"),)), "M")
    assert "pair (order, not time)" in [event["args"].get("name") for event in events]


def test_slice_carries_all_details(llama):
    event = _events(llama)[1]
    assert event["name"] == "all_gather layers.0"
    assert event["cat"] == "forward"
    assert event["args"]["cause"] == {
        "type": "fully_shard",
        "action": "unshard",
        "num_parameters": 9,
    }
    assert event["args"]["source"]["line"] == 210
    assert event["args"]["output_bytes"] == llama.collectives[1].output_bytes


def test_metadata_says_that_durations_were_not_measured(llama):
    real = replace(llama, run=replace(llama.run, is_simulated=False))
    metadata = json.loads(render_perfetto(real))["otherData"]
    assert "Durations were not measured" in metadata["note"]
    assert metadata["run"]["world_size"] == 1024


def test_collectives_without_times_keep_their_order():
    calls = tuple(make_collective(order=order, group_order=order) for order in range(5))
    starts = [event["ts"] for event in _events(make_recording(calls))]
    assert starts == [0, 10, 20, 30, 40]


def _starts(calls):
    return {
        (event["pid"], event["args"]["order"]): event["ts"]
        for event in _events(make_recording(tuple(calls)))
    }


def test_ranks_are_aligned_on_the_first_collective_they_share():
    calls = [
        make_collective(rank=0, order=0, group="own", start_ns=1_000_000),
        make_collective(rank=0, order=1, start_ns=5_000_000),
        make_collective(rank=1, order=0, start_ns=70_000_000),
        make_collective(rank=1, order=1, group_order=1, start_ns=71_000_000),
    ]
    starts = _starts(calls)
    assert starts[0, 0] == 0
    assert starts[0, 1] == starts[1, 0] == 4000
    assert starts[1, 1] == 5000


def test_alignment_reaches_ranks_through_others():
    calls = [
        make_collective(rank=0, group="a", start_ns=0),
        make_collective(rank=1, group="a", start_ns=10_000),
        make_collective(rank=1, order=1, group="b", start_ns=30_000),
        make_collective(rank=2, group="b", start_ns=900_000),
    ]
    starts = _starts(calls)
    assert starts[1, 0] == starts[0, 0]
    assert starts[2, 0] == starts[1, 1] == 20


def test_pipeline_stages_are_aligned_on_their_first_transfer():
    calls = [
        make_collective(rank=0, kind=CollectiveKind.SEND, peer=1, start_ns=5_000),
        make_collective(rank=1, kind=CollectiveKind.RECV, peer=0, start_ns=99_000),
    ]
    starts = _starts(calls)
    assert starts[0, 0] == starts[1, 0]


def test_ranks_that_never_meet_keep_their_own_clocks():
    calls = [
        make_collective(rank=0, group="a", start_ns=1_000),
        make_collective(rank=1, group="b", start_ns=9_000),
    ]
    assert _starts(calls) == {(0, 0): 0, (1, 0): 8}


def test_memory_is_a_counter_of_every_kind():
    num_bytes = tuple(range(len(MemoryKind)))
    profile = MemoryProfile(
        rank=3,
        peak_bytes=21,
        peak_order=7,
        peak_phase=Phase.FORWARD,
        samples=(
            MemorySample(order=5, phase=Phase.OUTSIDE, module=None, num_bytes=num_bytes),
            MemorySample(order=7, phase=Phase.FORWARD, module="a", num_bytes=num_bytes),
        ),
    )
    recording = replace(make_recording(), memory=(profile,))
    counters = _events(recording, "C")
    assert [(counter["pid"], counter["ts"]) for counter in counters] == [(3, 0), (3, 2)]
    assert counters[0]["args"] == dict(zip(map(str, MemoryKind), num_bytes, strict=True))
    alone = replace(recording, collectives=(), groups=())
    assert len(_events(alone, "C")) == 2
