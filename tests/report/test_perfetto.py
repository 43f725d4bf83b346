"""The trace is what ui.perfetto.dev reads: processes, tracks, slices that do not overlap."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise

from sample_recordings import make_collective, make_llama, make_recording
from shardscope.record import CollectiveKind
from shardscope.report.perfetto import render_perfetto


def _events(recording, phase="X"):
    trace = json.loads(render_perfetto(recording))
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_every_collective_is_a_slice_and_bytes_repeat(any_recording):
    assert len(_events(any_recording)) == len(any_recording.collectives)
    assert render_perfetto(any_recording) == render_perfetto(any_recording)


def test_slices_of_a_track_never_overlap(any_recording):
    tracks = defaultdict(list)
    for event in _events(any_recording):
        assert event["ts"] >= 0
        assert event["dur"] > 0
        tracks[event["pid"], event["tid"]].append(event)
    for events in tracks.values():
        for before, after in pairwise(events):
            assert before["ts"] + before["dur"] <= after["ts"]


def test_a_process_per_rank_and_a_track_per_axis():
    names = _events(make_llama(num_layers=1, dp=1, ranks=(0, 1)), "M")
    processes = {e["pid"]: e["args"]["name"] for e in names if e["name"] == "process_name"}
    assert processes == {0: "rank 0", 1: "rank 1"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in names if e["name"] == "thread_name"}
    assert threads == {(0, 1): "dp", (0, 2): "tp", (1, 1): "dp", (1, 2): "tp"}


def test_groups_without_an_axis_have_their_own_track():
    events = _events(make_recording((make_collective(group="pair"),)), "M")
    assert "pair" in [event["args"].get("name") for event in events]


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
    other = json.loads(render_perfetto(llama))["otherData"]
    assert "Durations were not measured" in other["note"]
    assert other["run"]["world_size"] == 1024


def test_collectives_without_times_keep_their_order():
    calls = tuple(make_collective(order=order, group_order=order) for order in range(5))
    starts = [event["ts"] for event in _events(make_recording(calls))]
    assert starts == [0, 1, 2, 3, 4]


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
