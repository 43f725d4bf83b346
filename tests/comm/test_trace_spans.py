"""Phases that end while a trace is open are in its recording, on the clock of its collectives."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardscope import Recording, World, load, merge, phases, simulate, trace
from shardscope.attribution.spans import SUBSCRIPTIONS, Timing
from shardscope.comm import trace_session
from shardscope.errors import TraceError
from small_models import Net, batch

pytestmark = pytest.mark.usefixtures("host_clock_only")


def shape(t: Any) -> list[tuple[str, int]]:
    return [(span.name, span.depth) for span in t.recording.spans]


def issue_around_a_phase() -> Recording:
    with trace() as t:
        dist.barrier()
        with phases("around"):
            dist.barrier()
        dist.barrier()
    return t.recording


def test_spans_and_collectives_share_a_clock() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        recording = issue_around_a_phase()
    finally:
        dist.destroy_process_group()
    (span,) = recording.spans
    before, inside, after = (call.start_ns for call in recording.collectives)
    assert before < span.start_ns <= inside <= span.start_ns + span.duration_ns < after


def test_collectives_of_a_simulation_have_no_times(world: World) -> None:
    recording = issue_around_a_phase()
    assert recording.run.is_simulated
    assert {call.start_ns for call in recording.collectives} == {None}


def test_torchs_own_fake_world_is_a_simulation() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        recording = issue_around_a_phase()
    finally:
        dist.destroy_process_group()
    assert recording.run.is_simulated
    assert {call.start_ns for call in recording.collectives} == {None}


def test_phases_of_a_sharded_step_are_there_with_rank_and_thread() -> None:
    class Phased(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        @phases("forward")
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.net(x)
            assert isinstance(y, torch.Tensor)
            return y

    with simulate({"dp": 4}, rank=2):
        model = Phased()
        with trace(model) as t, phases("step"):
            loss = model(batch()).sum()
            with phases("backward"):
                loss.backward()
    assert shape(t) == [("forward", 1), ("backward", 1), ("step", 0)]
    assert {(span.rank, span.thread, span.device) for span in t.recording.spans} == {(2, "", "cpu")}
    assert t.recording.collectives[0].owner == "net.layers.0.sum"


def test_a_phase_changes_nothing_that_is_recorded_of_collectives(world: World) -> None:
    @phases("reduce")
    def reduce() -> None:
        dist.all_reduce(torch.ones(2))

    with trace() as t:
        reduce()
    (call,) = t.recording.collectives
    assert call.source is not None
    assert call.source.function.endswith(".reduce")
    assert call.source.text == "dist.all_reduce(torch.ones(2))"


def test_phases_need_no_process_group_and_no_collective() -> None:
    with trace() as t, phases("load"):
        pass
    assert shape(t) == [("load", 0)]
    assert t.recording.gaps == ()


def test_spans_before_the_world_began_are_the_ranks() -> None:
    with trace() as t:
        with phases("early"):
            pass
        with simulate({"dp": 4}, rank=3), phases("in it"):
            pass
    assert [(span.name, span.rank) for span in t.recording.spans] == [("early", 3), ("in it", 3)]
    assert t.recording.run.world_size == 4


def test_spans_of_one_rank_do_not_become_anothers() -> None:
    t = trace()
    with simulate({"dp": 4}, rank=3), t, phases("a"):
        pass
    again = pytest.raises(TraceError, match="rank 3 of 4 and is entered again as rank 1 of 4")
    with again, simulate({"dp": 4}, rank=1), t:
        raise NotImplementedError
    with trace() as late:
        for rank in (3, 1):
            with simulate({"dp": 4}, rank=rank), phases(f"of {rank}"):
                pass
    assert [(span.name, span.rank) for span in late.recording.spans] == [("of 3", 3)]
    assert [gap.place for gap in late.recording.gaps] == ["world"]


def test_stream_holds_the_spans_as_they_end(world: World, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with trace(stream=path) as t:
        for number in range(3):
            with phases("a"), phases("b"):
                pass
            assert len(load(path).spans) == 2 * (number + 1)
    assert load(path) == t.recording
    assert t.recording.gaps == ()


def test_stream_that_waits_for_its_rank_has_early_spans(tmp_path: Path) -> None:
    with trace(stream=tmp_path / "run-{rank}.jsonl") as t:
        with phases("early"):
            pass
        with simulate({"dp": 4}, rank=1), phases("late"):
            pass
    streamed = load(tmp_path / "run-1.jsonl")
    assert streamed.spans == t.recording.spans
    assert [span.rank for span in streamed.spans] == [1, 1]


def test_traces_within_each_other_each_have_what_they_saw(world: World) -> None:
    with trace() as outer, phases("a"):
        with trace() as inner, phases("b"):
            pass
        with phases("c"):
            pass
    assert shape(inner) == [("b", 0)]
    assert shape(outer) == [("b", 1), ("c", 1), ("a", 0)]
    assert SUBSCRIPTIONS == []


def test_a_failed_step_leaves_its_spans(world: World) -> None:
    with pytest.raises(ZeroDivisionError), trace() as t, phases("a"), phases("b"):
        raise ZeroDivisionError
    assert shape(t) == [("b", 1), ("a", 0)]
    assert SUBSCRIPTIONS == []


def test_of_very_many_spans_the_first_are_kept_and_a_gap_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trace_session, "_MAX_SPANS", 5)
    facts = []
    for stream in (None, tmp_path / "run.jsonl"):
        with trace(stream=stream) as t:
            for _ in range(8):
                with phases("a"):
                    pass
        assert len(t.recording.spans) == 5
        facts += [gap.fact for gap in t.recording.gaps]
    assert facts == [
        "the first 5 spans are kept; 3 later ones are lost",
        "the first 5 spans are kept; 3 later ones are in the stream only",
    ]
    assert len(load(tmp_path / "run.jsonl").spans) == 8


def test_a_subscriber_that_fails_is_a_gap_and_not_the_users_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("broken")

    with trace() as t:
        monkeypatch.setattr(Timing, "as_span", fail)
        with phases("a"):
            pass
        monkeypatch.undo()
    (gap,) = t.recording.gaps
    assert gap.fact == "a span could not be recorded (KeyError('broken'))"


def test_names_that_json_cannot_hold_are_written_out(world: World, tmp_path: Path) -> None:
    with trace(stream=tmp_path / "run.jsonl") as t, phases("odd \udcff"):
        pass
    assert load(tmp_path / "run.jsonl").spans == t.recording.spans
    assert t.recording.spans[0].name == "odd \\udcff"
    t.save(tmp_path / "run.json")
    assert load(tmp_path / "run.json") == t.recording


def test_merged_ranks_keep_their_spans() -> None:
    parts = []
    for rank in range(2):
        with simulate({"dp": 2}, rank=rank), trace() as t, phases("a"):
            pass
        parts.append(t.recording)
    merged = merge(reversed(parts))
    assert [span.rank for span in merged.spans] == [0, 1]
    assert all(before.rank < after.rank for before, after in pairwise(merged.spans))
