"""Time and memory that `shardscope hang` takes for the files of 1,024 ranks.

One rank skips a collective in its last step. Dumps are pickles of Flight Recorder with stacks, at
torch's largest usual number of entries; streams are what `trace(stream=…)` writes.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.hang.faults import Fault, Issued, Outcome, run_fault
from benchmarks.hang.schedule import World, make_step
from benchmarks.hang.writers import make_flight, name_groups, write_stream
from rich.console import Console

AXES = {"pp": 8, "dp": 16, "tp": 8}
RANK = 777
DUMPED_CALLS = 2_000  # of each rank
STREAMED_CALLS = 500


def measure_large(folder: Path, console: Console) -> None:
    """Write the files of each format, explain them in a process of their own, and print figures."""
    writers: dict[str, Callable[[Path], int]] = {
        "Flight Recorder": write_dumps,
        "streams": write_streams,
    }
    for name, write in writers.items():
        place = folder / name.replace(" ", "_")
        place.mkdir()
        num_calls = write(place)
        num_bytes = sum(file.stat().st_size for file in place.iterdir())
        start = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, "-m", "shardscope", "hang", str(place)],
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            printed = process.stdout.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - start
        cpu = usage.ru_utime + usage.ru_stime  # of both of its processes
        peak = usage.ru_maxrss * 1024  # of the larger
        verdict = next(line for line in printed.splitlines() if line.startswith("Hangs"))
        console.print(
            f"{name}: 1,024 ranks, {num_calls:,} calls, {num_bytes / 2**20:.0f} MiB: "
            f"{seconds:.1f} s ({cpu:.1f} s of CPU), peak {peak / 2**20:.0f} MiB, "
            f"exit code {process.returncode}"
        )
        console.print(f"    {verdict}")


def make_outcome(num_calls: int) -> Outcome:
    """A rank that skips a collective, after so many calls of each rank."""
    world = World(AXES)
    step = make_step(world, RANK)
    index = next(place for place, op in enumerate(step) if op.axis == "tp")
    outcome = run_fault(world, Fault("skip", "tp", RANK, index, blocking=False), seed=1)
    for calls in outcome.calls.values():
        repeat_history(calls, num_calls)
    return outcome


def repeat_history(calls: list[Issued], num_calls: int) -> None:
    """Put steps before the first one until there are enough calls, and number them anew."""
    first = calls[0].op
    length = next(place for place in range(1, len(calls)) if calls[place].op == first)
    missing = max(0, num_calls - len(calls)) // length
    step = calls[:length]
    copies = [
        Issued(call.op, call.group, call.position, 0, is_done=True)
        for _ in range(missing)
        for call in step
    ]
    calls[:0] = copies
    counts: dict[tuple[str, tuple[int, ...]], int] = {}
    start_ns = calls[-1].created_ns - len(calls) * 2_000_000
    for place, call in enumerate(calls):
        call.created_ns = start_ns + place * 2_000_000
        call.done_ns = call.created_ns + 1_000_000 if call.is_done else 0
        if call.position >= 0:
            key = call.op.axis, call.group
            call.position = counts[key] = counts.get(key, -1) + 1


def write_dumps(folder: Path) -> int:
    """Pickles of all ranks; how many calls they hold."""
    outcome = make_outcome(DUMPED_CALLS)
    names = name_groups(outcome)
    total = 0
    for rank, calls in outcome.calls.items():
        dump = make_flight(outcome, rank, names=names, stacks=True)
        total += len(calls)
        path = folder / f"node-{rank // 8:03d}_nccl_trace_rank_{rank}"
        path.write_bytes(pickle.dumps(dump, protocol=2))
    return total


def write_streams(folder: Path) -> int:
    """Streams of all ranks, without an end; how many calls they hold."""
    outcome = make_outcome(STREAMED_CALLS)
    names = name_groups(outcome)
    for rank in outcome.calls:
        write_stream(outcome, rank, folder / f"node-{rank // 8:03d}_run-{rank}.jsonl", names)
    return sum(map(len, outcome.calls.values()))
