"""Device times of spans arrive on the host's clock once known, without waiting for the device.

The device is a fake: what is tested is the bookkeeping. benchmarks/phases_check.py has a real one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from shardscope import load, phases, trace
from shardscope.attribution import spans as device_clock
from shardscope.attribution.spans import DEVICE_CLOCK, DeviceClock


class FakeEvent:
    """Happens when its device gets there; `at_ms` is its own clock's."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.at_ms: float | None = None
        self.number = 0

    def record(self, stream: Any) -> None:
        self.number = next(self.device.numbers)
        self.at_ms = self.device.now_ms
        self.stream = stream

    def query(self) -> bool:
        self.device.num_questions += 1
        if self.device.is_broken:
            raise RuntimeError("device-side assert")
        return self.number <= self.device.done.get(self.stream, -1)

    def elapsed_time(self, end_event: Any) -> float:
        assert self.query()
        assert end_event.query()
        (elapsed,) = struct.unpack("f", struct.pack("f", end_event.at_ms - self.at_ms))
        return float(elapsed)  # torch's are of 32 bits


class FakeDevice:
    """A device whose progress on each stream the test decides."""

    def __init__(self) -> None:
        self.stream: str | None = "main"
        self.now_ms = 0.0
        self.numbers = iter(range(10**9))
        self.done: dict[str, int] = {}
        self.num_questions = self.num_events = 0
        self.is_broken = False

    def current_stream(self, name: str | None) -> tuple[str, Any] | None:
        return None if self.stream is None else (name or "cuda:0", self.stream)

    def make_event(self) -> FakeEvent:
        self.num_events += 1
        return FakeEvent(self)

    def can_query(self) -> bool:
        return True

    def finish(self, *streams: str) -> None:
        for stream in streams or ("main",):
            self.done[stream] = 10**9


class RecordedSpan:
    """A span that stores the times it receives."""

    def __init__(self) -> None:
        self.times: list[tuple[int, int]] = []

    def settle(self, start_ns: int, duration_ns: int) -> None:
        self.times.append((start_ns, duration_ns))

    def is_for(self, subscriber: object) -> bool:
        return subscriber == "me"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The host's clock, as a list of one number."""
    now = [1_000_000]
    monkeypatch.setattr(device_clock.time, "perf_counter_ns", lambda: now[0])
    return now


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


def time_span(clock: DeviceClock, device: FakeDevice, duration_ms: float) -> RecordedSpan:
    span = RecordedSpan()
    mark = clock.begin()
    assert mark is not None
    device.now_ms += duration_ms
    clock.end(mark, span)
    return span


def test_a_span_gets_its_times_when_the_device_has_finished_it(
    host: list[int], device: FakeDevice
) -> None:
    clock = DeviceClock(device)
    span = time_span(clock, device, 2.5)
    clock.settle()
    assert span.times == []
    assert (clock.num_waiting("me"), clock.num_waiting("you")) == (1, 0)
    device.finish()
    clock.settle()
    clock.settle()
    ((start_ns, duration_ns),) = span.times
    assert duration_ns == 2_500_000
    assert abs(start_ns - 1_000_000) < 200  # what a bound loses as it grows old
    assert clock.num_waiting("me") == 0


def test_events_are_not_queried_while_spans_are_few(host: list[int], device: FakeDevice) -> None:
    clock = DeviceClock(device)
    for _ in range(500):
        time_span(clock, device, 1)
    assert device.num_questions == 0


def test_a_stream_that_is_behind_does_not_hold_up_another(
    host: list[int], device: FakeDevice
) -> None:
    clock = DeviceClock(device)
    behind = [time_span(clock, device, 1) for _ in range(3)]
    device.stream = "side"
    ahead = time_span(clock, device, 1)
    device.finish("side")
    device.done["main"] = 0  # the anchor has happened
    device.num_questions = 0
    clock.settle()
    assert len(ahead.times) == 1
    assert [span.times for span in behind] == [[], [], []]
    assert device.num_questions <= 6  # only the first of those behind is queried
    device.finish("main")
    clock.settle()
    assert [len(span.times) for span in behind] == [1, 1, 1]


def test_the_device_is_never_ahead_of_the_host(host: list[int], device: FakeDevice) -> None:
    clock = DeviceClock(device)
    first = time_span(clock, device, 1)
    # The host is 40 ms on by the time it puts the second there, and the device has but 1 ms run.
    host[0] += 40_000_000
    second = time_span(clock, device, 5)
    device.finish()
    clock.settle()
    (start, duration), (first_start, _) = second.times[0], first.times[0]
    assert start + duration == host[0]
    assert start - first_start == 1_000_000  # by the device's own clock


def test_a_long_run_holds_few_events_and_uses_them_again(
    host: list[int], device: FakeDevice
) -> None:
    clock = DeviceClock(device)
    device.finish()
    spans = [time_span(clock, device, 0.001) for _ in range(5000)]
    clock.settle()
    assert all(len(span.times) == 1 for span in spans)
    assert device.num_events <= 1100
    assert clock.num_lost == 0


def test_pending_spans_of_a_hanging_device_are_bounded(host: list[int], device: FakeDevice) -> None:
    clock = DeviceClock(device)
    marks = 0
    for _ in range(6000):
        mark = clock.begin()
        if mark is not None:
            marks += 1
            clock.end(mark, RecordedSpan())
    assert marks == 4096
    assert clock.num_lost == 6000 - 4096


def test_times_of_a_long_run_stay_exact(host: list[int], device: FakeDevice) -> None:
    clock = DeviceClock(device)
    device.finish()
    ends = []
    for _ in range(3000):  # more than four hours
        host[0] += 5_000_500_000
        device.now_ms += 5_000
        span = time_span(clock, device, 0.5)
        clock.settle()
        ends.append(sum(span.times[0]))
    steps_ns = [after - before for before, after in pairwise(ends[3:])]  # the clock is set by then
    assert max(abs(step - 5_000_500_000) for step in steps_ns) < 2_000


@pytest.mark.parametrize("drift_ppm", [-20, 20])
def test_a_device_whose_clock_drifts_is_set_again(
    host: list[int], device: FakeDevice, drift_ppm: int
) -> None:
    clock = DeviceClock(device)
    device.finish()
    for _ in range(720):  # an hour, after which the clocks are 72 ms apart
        host[0] += 5_000_000_000
        device.now_ms += 5_000 * (1 + drift_ppm / 1e6)
        span = time_span(clock, device, 0.0)
        clock.settle()
    assert abs(sum(span.times[0]) - host[0]) < 500_000


def test_a_broken_device_loses_times_and_raises_nothing(
    host: list[int], device: FakeDevice
) -> None:
    clock = DeviceClock(device)
    span = time_span(clock, device, 1)
    device.is_broken = True
    clock.settle()
    assert (span.times, clock.num_lost, clock.num_waiting("me")) == ([], 1, 0)


def test_without_a_stream_nothing_is_timed(device: FakeDevice) -> None:
    device.stream = None
    assert DeviceClock(device).begin() is None
    assert device.num_events == 0


@pytest.fixture
def fake_device(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """The process's clock reads a played device, and has nothing left of a real one's events."""
    for name, value in vars(DeviceClock(device)).items():
        monkeypatch.setattr(DEVICE_CLOCK, name, value)
    return device


def test_phases_are_timed_on_the_host_and_on_the_device(fake_device: FakeDevice) -> None:
    with phases.record() as times, phases("outer"):
        fake_device.now_ms += 1
        with phases("inner"):
            fake_device.now_ms += 3
        with phases("host", device="cpu"):
            pass
    assert times.num_running == 2
    assert "rank 0, 2 still running" in str(times)
    assert {total.device for total in times.totals} == {"cpu"}
    fake_device.finish()
    assert times.num_running == 0
    inner, outer = times["inner"], times["outer"]
    assert (inner.device, inner.total_ns, inner.self_ns) == ("cuda:0", 3_000_000, 3_000_000)
    assert (outer.device, outer.total_ns, outer.self_ns) == ("cuda:0", 4_000_000, 1_000_000)
    assert [(span.name, span.depth) for span in times.spans if span.device == "cuda:0"] == [
        ("inner", 1),
        ("outer", 0),
    ]
    assert times["host"].device == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_real_device_has_spans_once_the_program_uses_it() -> None:
    torch.ones(8, device="cuda")
    with phases.record() as times, phases("step"):
        torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    assert times.num_running == 0
    assert [(span.name, span.device) for span in times.spans] == [
        ("step", "cpu"),
        ("step", f"cuda:{torch.cuda.current_device()}"),
    ]


class RealEvent:
    """An event of a GPU: it cannot be recorded on a stream of another device."""

    def record(self, stream: Any) -> None:
        raise RuntimeError("Event device does not match the stream's")


@pytest.fixture
def used_gpu() -> Iterator[None]:
    """The process's clock has timed work on a GPU before, and keeps its events for use again."""
    DEVICE_CLOCK._free["cuda:0"].append(RealEvent())
    yield
    DEVICE_CLOCK._free["cuda:0"].pop()


def test_a_fake_device_gets_no_events_of_a_real_one(
    used_gpu: None, fake_device: FakeDevice
) -> None:
    with phases.record() as times, phases("step"):
        fake_device.now_ms += 3
    fake_device.finish()
    assert times["step"].total_ns == 3_000_000


def test_work_on_another_stream_is_not_within_a_phase(fake_device: FakeDevice) -> None:
    with phases.record() as times, phases("outer"):
        fake_device.stream = "side"
        with phases("inner"):
            fake_device.now_ms += 3
        fake_device.stream = "main"
    fake_device.finish("main", "side")
    assert times["outer"].self_ns == times["outer"].total_ns == 3_000_000


def test_a_recording_says_what_the_device_has_not_finished(fake_device: FakeDevice) -> None:
    with trace() as t, phases("step"):
        pass
    (gap,) = t.recording.gaps
    assert "has not finished 1 of the spans" in gap.fact
    assert "torch.cuda.synchronize()" in gap.fact
    fake_device.finish()
    assert t.recording.gaps == ()
    assert [span.device for span in t.recording.spans] == ["cpu", "cuda:0"]


def test_a_stream_lacks_what_was_not_finished_and_says_so(
    fake_device: FakeDevice, tmp_path: Any
) -> None:
    path = tmp_path / "run.jsonl"
    t = trace(stream=path)
    with t, phases("step"):
        pass
    (gap,) = load(path).gaps
    assert "had not finished when the trace ended" in gap.fact
    fake_device.finish()
    with t:
        pass
    assert [span.device for span in t.recording.spans] == ["cpu", "cuda:0"]
    assert load(path).spans == t.recording.spans  # it was late, and entered again in time


def test_a_stream_has_what_was_finished_in_time(fake_device: FakeDevice, tmp_path: Any) -> None:
    fake_device.finish()
    with trace(stream=tmp_path / "run.jsonl") as t, phases("step"):
        fake_device.now_ms += 2
    assert [span.device for span in load(tmp_path / "run.jsonl").spans] == ["cpu", "cuda:0"]
    assert load(tmp_path / "run.jsonl") == t.recording
