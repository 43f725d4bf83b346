"""Phases on a real device: events tell known times, and nobody waits for them.

Says first what a phase costs the host, with and without somebody who records; then, where there is
a CUDA device, checks the times of sleeps whose length is known. Exits with 1 if a check fails.
Run it as: python benchmarks/phases_check.py
"""

from __future__ import annotations

import json
import sys
import threading
import time
import timeit
import traceback
from collections.abc import Callable

import torch
from torch.distributed.fsdp._debug_utils import SimpleProfiler

from shardscope import phases, trace
from shardscope.record import Span
from shardscope.report.export.perfetto import render_perfetto

_CYCLES = 20_000_000  # about 10 ms on today's devices; what it is on this one is measured


def _plain() -> None:
    pass


def _phased() -> None:
    with phases("x"):
        pass


@phases("x")
def _decorated() -> None:
    pass


def _profiled() -> None:
    with SimpleProfiler.profile("x"):
        pass


def _nanoseconds(function: Callable[[], None], number: int) -> float:
    return min(timeit.repeat(function, number=number, repeat=7)) / number * 1e9


def report_cost(title: str, number: int) -> None:
    """What one phase costs the host, less an empty call."""
    base = _nanoseconds(_plain, number)
    print(f"{title}: context {_nanoseconds(_phased, number) - base:,.0f} ns", end=", ")
    print(f"decorator {_nanoseconds(_decorated, number) - base:,.0f} ns", end=", ")
    print(f"SimpleProfiler {_nanoseconds(_profiled, number) - base:,.0f} ns")


def _report_costs(where: str) -> None:
    report_cost(f"{where}, nobody records", 100_000)
    with phases.record():
        report_cost(f"{where}, phases.record()", 3_000)
    with trace():
        report_cost(f"{where}, trace()", 3_000)


def _sleep(cycles: int = _CYCLES) -> None:
    torch.cuda._sleep(cycles)


def _measure_sleep_ms() -> float:
    """How long one sleep takes, by plain events; the least of several, after a warm-up."""
    taken = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        _sleep()
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end))
    return min(taken[1:])


def _close(found_ns: float, wanted_ms: float, tolerance: float = 0.15) -> bool:
    return abs(found_ns / 1e6 - wanted_ms) <= tolerance * wanted_ms + 0.1


def times_are_right(sleep_ms: float) -> None:
    """Nested phases tell the device's time and their own share of it."""
    with phases.record() as times, phases("outer"):
        _sleep()
        with phases("inner"):
            _sleep(2 * _CYCLES)
    torch.cuda.synchronize()
    print(times)
    outer, inner = times["outer"], times["inner"]
    assert outer.device == inner.device == f"cuda:{torch.cuda.current_device()}"
    assert _close(inner.total_ns, 2 * sleep_ms), (inner, sleep_ms)
    assert _close(outer.total_ns, 3 * sleep_ms), (outer, sleep_ms)
    assert _close(outer.self_ns, sleep_ms), (outer, sleep_ms)
    assert times.num_running == 0


def nobody_waits(sleep_ms: float) -> None:
    """The host is done with twenty phases long before the device is."""
    torch.cuda.synchronize()
    with phases.record() as times:
        begin = time.perf_counter()
        for _ in range(20):
            with phases("sleep"):
                _sleep()
        host_ms = (time.perf_counter() - begin) * 1e3
        num_running = times.num_running  # asking waits for nothing either
        asked_ms = (time.perf_counter() - begin) * 1e3
    torch.cuda.synchronize()
    done_ms = (time.perf_counter() - begin) * 1e3
    print(
        f"host done after {host_ms:.2f} ms, asked by {asked_ms:.2f} ms ({num_running} running), "
        f"device done after {done_ms:.1f} ms"
    )
    assert asked_ms < 0.25 * done_ms
    assert num_running >= 15
    assert times["sleep"].count == 20
    assert _close(times["sleep"].mean_ns, sleep_ms)


def clocks_agree(sleep_ms: float) -> None:
    """On a device that is idle, work begins on the device's track just after the host's."""
    torch.cuda.synchronize()
    with trace() as t:
        for _ in range(3):
            with phases("step"):
                _sleep()
            torch.cuda.synchronize()
            time.sleep(0.002)
    spans = t.recording.spans
    hosts = [span for span in spans if span.device == "cpu"]
    devices = [span for span in spans if span.device != "cpu"]
    for host, device in zip(hosts, devices, strict=True):
        late_us = (device.start_ns - host.start_ns) / 1e3
        print(f"device {late_us:+.1f} µs after the host")
        assert abs(late_us) < 1_000, (host, device)
        assert _close(device.duration_ns, sleep_ms)
    slices = json.loads(render_perfetto(t.recording))["traceEvents"]
    assert sum(event["ph"] == "X" for event in slices) == 6


def a_recording_says_what_is_not_finished(sleep_ms: float) -> None:
    """Asked too early there is a gap, and none when the device is done."""
    torch.cuda.synchronize()
    with trace() as t, phases("step"):
        _sleep(5 * _CYCLES)
    assert any("not finished 1 of the spans" in gap.fact for gap in t.recording.gaps)
    torch.cuda.synchronize()
    assert t.recording.gaps == ()
    assert any(_close(span.duration_ns, 5 * sleep_ms) for span in t.recording.spans)


def streams_run_side_by_side(sleep_ms: float) -> None:
    """A phase on another stream is timed there, and is no part of the one around it."""
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with phases.record() as times, phases("main"):
        with torch.cuda.stream(side), phases("side"):
            _sleep()
        _sleep()
    torch.cuda.synchronize()
    print(times)
    assert _close(times["side"].total_ns, sleep_ms, 1.2)  # both may share the device
    assert times["main"].self_ns == times["main"].total_ns


def a_graph_is_captured_as_ever(sleep_ms: float) -> None:
    """Inside a capture only the host's clock is read; the graph replays."""
    x = torch.ones(8, device="cuda")
    warm_up = torch.cuda.Stream()
    with torch.cuda.stream(warm_up):
        y = x * 2
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with phases.record() as times:
        with phases("before"):
            _sleep(_CYCLES // 10)
        with torch.cuda.graph(graph), phases("captured"):
            y = x * 2
            assert times.totals  # asking does not spoil it
        x.fill_(3)
        with phases("replay"):
            graph.replay()
    torch.cuda.synchronize()
    assert y.tolist() == [6.0] * 8
    assert times["captured"].device == "cpu"
    assert times["replay"].device != "cpu"


def long_runs_hold_little(sleep_ms: float) -> None:
    """Ten thousand phases with nobody asking: few events wait, none is lost."""
    x = torch.ones(64, device="cuda")
    with phases.record(keep=10) as times:
        for _ in range(10_000):
            with phases("add"):
                x.add_(1)
    torch.cuda.synchronize()
    assert times["add"].count == 10_000, times["add"]
    assert len(times.spans) == 10
    print(times)


def threads_have_their_own(sleep_ms: float) -> None:
    """Phases on other threads are timed on the device too."""

    def work() -> None:
        with phases("thread"):
            _sleep()

    with phases.record() as times:
        threads = [threading.Thread(target=work, name=f"worker {n}") for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    torch.cuda.synchronize()
    timed = [span for span in times.spans if span.device != "cpu"]
    assert sorted(span.thread for span in timed) == [f"worker {n}" for n in range(3)]
    assert all(isinstance(span, Span) and span.depth == 0 for span in timed)


_CHECKS = (
    times_are_right,
    nobody_waits,
    clocks_agree,
    a_recording_says_what_is_not_finished,
    streams_run_side_by_side,
    a_graph_is_captured_as_ever,
    long_runs_hold_little,
    threads_have_their_own,
)


def main() -> int:
    """Costs, then every check; the number of those that failed."""
    print(f"torch {torch.__version__}")
    _report_costs("host")
    if not torch.cuda.is_available():
        print("There is no CUDA device here: nothing else was checked.")
        return 0
    torch.cuda.init()
    print(torch.cuda.get_device_name())
    sleep_ms = _measure_sleep_ms()
    print(f"one sleep takes {sleep_ms:.2f} ms")
    _report_costs("cuda")
    torch.cuda.synchronize()
    num_failed = 0
    for check in _CHECKS:
        print(f"\n== {check.__name__}")
        try:
            check(sleep_ms)
            print("ok")
        except Exception:  # noqa: BLE001 - the other checks are worth running
            traceback.print_exc(file=sys.stdout)
            num_failed += 1
    print(f"\n{len(_CHECKS) - num_failed} of {len(_CHECKS)} checks passed")
    return min(1, num_failed)


if __name__ == "__main__":
    sys.exit(main())
