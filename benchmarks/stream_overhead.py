"""What a stream costs: µs of each collective above the same step untraced, interleaved in one run.

    python benchmarks/stream_overhead.py                 # ranks simulated by torch's fake group
    python benchmarks/stream_overhead.py --ranks 2       # two real gloo ranks; 1 is a group of one
    python benchmarks/stream_overhead.py --ranks 1 --collectives 1000000    # memory and file size

A contender is one trace, which is entered again for each of its steps, so that it has seen them
before, as in a training run. Time is that of the thread, without other processes and waiting.
The difference of steps also has the module calls that are watched, and the noise of all that the
step computes. `--inside` measures where the tracer is called for a collective, and nothing else.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardscope import trace
from shardscope._torch.collectives.events import CollectiveEvent
from shardscope._torch.collectives.hooks import intercept
from shardscope.cli._llama import Llama, LlamaConfig, batch, compute_gradients, parallelize

UNTRACED = "untraced"
NUM_SIMULATED = 8
STREAM_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A step, the model whose modules it calls, and how often a sample repeats it."""

    name: str
    model: nn.Module | None
    step: Callable[[], None]
    num_repeats: int


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What a process that is traced has in memory, and its stream on disk."""

    num_collectives: int
    resident_mib: float
    num_objects: int
    stream_mib: float


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a contender adds to each collective of a workload, in µs."""

    workload: str
    num_collectives: int
    contender: str
    median_us: float
    quartiles_us: tuple[float, float]
    step_us: float
    num_rounds: int


# ── Workloads ────────────────────────────────────────────────────────────────────────────────


def make_workloads(names: tuple[str, ...]) -> Iterator[Workload]:
    makers = {
        "explicit": make_explicit,
        "TP": lambda: make_llama("TP", "tp"),
        "FSDP2": lambda: make_llama("FSDP2", "dp"),
        "DDP": make_ddp,
    }
    if dist.get_backend() == "fake":  # DDP's backward fails there
        del makers["DDP"]
    for name, make in makers.items():
        if not names or name in names:
            yield make()


def make_explicit() -> Workload:
    """Calls of torch.distributed, outside any module."""
    x, parts = torch.ones(16), torch.ones(16 * dist.get_world_size())

    def step() -> None:
        for _ in range(10):
            dist.all_reduce(x)
            dist.all_gather_into_tensor(parts, x)
            dist.broadcast(x, 0)
            dist.all_reduce(x, async_op=True).wait()

    return Workload(name="explicit", model=None, step=step, num_repeats=5)


def make_llama(name: str, axis: str) -> Workload:
    """Forward and backward of a small Llama of four layers."""
    config = LlamaConfig(
        dim=64,
        num_layers=4,
        num_heads=8,
        num_kv_heads=8,
        hidden_dim=256,
        vocab_size=256,
        max_seq_len=16,
    )
    torch.manual_seed(0)
    model = Llama(config)
    parallelize(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(axis,)))
    tokens = batch(model, num_sequences=1)

    def step() -> None:
        model.zero_grad()
        compute_gradients(model, tokens)

    return Workload(name=name, model=model, step=step, num_repeats=1)


def make_ddp() -> Workload:
    """Forward and backward of linear layers, each of which is a bucket of DDP's."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.01)
    x = torch.randn(4, 64)

    def step() -> None:
        model(x).sum().backward()

    return Workload(name="DDP", model=model, step=step, num_repeats=2)


# ── Measuring ────────────────────────────────────────────────────────────────────────────────


def measure(workload: Workload, folder: Path, num_rounds: int) -> list[Cost]:
    """The cost of each contender, from the difference to the untraced steps of the same round."""
    model = workload.model
    contexts: dict[str, AbstractContextManager[object]] = {
        UNTRACED: nullcontext(),
        "untraced, again": nullcontext(),
        "trace": trace(model),
        "trace, stream": trace(model, stream=folder / f"{workload.name}-{{rank}}.jsonl"),
    }
    num_collectives = count_collectives(workload)
    if not num_collectives:  # TP in a group of one
        return []
    names = list(contexts)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-3, num_rounds):
        gc.collect()
        gc.disable()
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            elapsed_us = time_step(workload, contexts[name])
            if number >= 0:
                times[name].append(elapsed_us)
        gc.enable()
    return [
        summarize(workload.name, num_collectives, name, own, times[UNTRACED])
        for name, own in times.items()
    ]


def measure_inside(workload: Workload, folder: Path, num_rounds: int) -> list[Cost]:
    """The thread's time that a trace takes for each collective, before and after it is issued."""
    contexts: dict[str, AbstractContextManager[object]] = {
        "two clocks": nullcontext(),
        "trace": trace(workload.model),
        "trace, stream": trace(workload.model, stream=folder / f"{workload.name}-inside.jsonl"),
    }
    own: dict[str, list[float]] = {name: [] for name in contexts}
    num_collectives = count_collectives(workload)
    for number in range(-3, num_rounds if num_collectives else -3):
        for name, context in contexts.items():
            outer, inner = Clock(), Clock()
            with (
                intercept(outer, report_missing=print),
                context,
                intercept(inner, report_missing=print),
            ):
                workload.step()
            if number >= 0:
                own[name].append(inner.total_us - outer.total_us)
    clocks = statistics.median(own["two clocks"])
    return [
        summarize(workload.name, num_collectives, name, times, [clocks] * len(times))
        for name, times in own.items()
        if times
    ]


class Clock:
    """Adds up when collectives are reported to it; of two, the difference is what is in between."""

    def __init__(self) -> None:
        self.total_us = 0.0

    def before(self, event: CollectiveEvent) -> Clock:
        self.total_us += time.thread_time_ns() / 1e3
        return self

    def after(self, noted: Clock) -> None:
        self.total_us += time.thread_time_ns() / 1e3


def time_step(workload: Workload, context: AbstractContextManager[object]) -> float:
    """The thread's time of a step inside the context, in µs, after one that warms its caches."""
    with context:
        workload.step()
        started = time.thread_time_ns()
        for _ in range(workload.num_repeats):
            workload.step()
        elapsed_ns = time.thread_time_ns() - started
    return elapsed_ns / workload.num_repeats / 1e3


def count_collectives(workload: Workload) -> int:
    workload.step()
    with trace(workload.model) as seen:
        workload.step()
    return len(seen.recording.collectives)


def summarize(
    workload: str, num_collectives: int, name: str, own: list[float], untraced: list[float]
) -> Cost:
    pairs = zip(own, untraced, strict=True)
    costs = [(own_us - untraced_us) / num_collectives for own_us, untraced_us in pairs]
    low, median, high = statistics.quantiles(costs, n=4)
    return Cost(
        workload=workload,
        num_collectives=num_collectives,
        contender=name,
        median_us=median,
        quartiles_us=(low, high),
        step_us=statistics.median(own),
        num_rounds=len(own),
    )


def measure_rank(names: tuple[str, ...], num_rounds: int, *, is_inside: bool) -> list[Cost]:
    """The costs of all workloads in the process group that this process is in."""
    torch.set_num_threads(1)
    run = measure_inside if is_inside else measure
    folder = Path(tempfile.mkdtemp(prefix="stream-overhead-"))
    try:
        return list(
            itertools.chain.from_iterable(
                run(workload, folder, num_rounds) for workload in make_workloads(names)
            )
        )
    finally:
        shutil.rmtree(folder)


def measure_growth(num_collectives: int) -> list[Growth]:
    """Memory and disk of a stream of limited size, at tenths of so many collectives."""
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="stream-growth-"))
    try:
        return list(run_collectives(folder, num_collectives))
    finally:
        shutil.rmtree(folder)


def run_collectives(folder: Path, num_collectives: int) -> Iterator[Growth]:
    """Steps of a module that issues four collectives, traced."""
    model = Communicating()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.ones(16)
    num_issued, num_reported = 0, 0
    with trace(model, stream=folder / "run-{rank}.jsonl", stream_bytes=STREAM_BYTES):
        while num_issued < num_collectives:
            model(x).sum().backward()
            optimizer.step()
            num_issued += Communicating.NUM_COLLECTIVES
            if num_issued >= num_reported + num_collectives // 10:
                num_reported = num_issued
                yield Growth(
                    num_collectives=num_issued,
                    resident_mib=read_resident_bytes() / 2**20,
                    num_objects=len(gc.get_objects()),
                    stream_mib=sum(file.stat().st_size for file in folder.iterdir()) / 2**20,
                )


class Communicating(nn.Module):
    """A layer whose forward issues collectives."""

    NUM_COLLECTIVES = 4

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.all_reduce(x, async_op=True).wait()
        dist.barrier()
        result: torch.Tensor = self.layer(x)
        return result


def read_resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def start_ranks(num_ranks: int, arguments: list[str]) -> int:
    """Run this script as real ranks; the first prints."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_ranks)}
    environment = {**os.environ, **own, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *arguments], env={**environment, "RANK": str(rank)}
        )
        for rank in range(num_ranks)
    ]
    return max(rank.wait() for rank in ranks)


# ── Report ───────────────────────────────────────────────────────────────────────────────────


def print_report(costs: list[Cost], group: str) -> None:
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(
        f"torch {torch.__version__} · Python {platform.python_version()} · {group} · thread's time"
    )
    table = Table(title="µs that each collective costs above the same step untraced")
    table.add_column("workload")
    table.add_column("tracer")
    for column in ("collectives", "median", "quartiles", "step µs"):
        table.add_column(column, justify="right")
    for cost in costs:
        low, high = cost.quartiles_us
        table.add_row(
            cost.workload,
            cost.contender,
            str(cost.num_collectives),
            f"{cost.median_us:.1f}",
            f"{low:.1f} – {high:.1f}",
            f"{cost.step_us:,.0f}",
        )
    console.print(table)


def print_growth(rows: list[Growth], group: str) -> None:
    console = Console(width=None if sys.stdout.isatty() else 110)
    table = Table(title=f"{group}, stream_bytes={STREAM_BYTES:,}")
    for column in ("collectives", "resident MiB", "Python objects", "stream MiB"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row.num_collectives:,}",
            f"{row.resident_mib:.1f}",
            f"{row.num_objects:,}",
            f"{row.stream_mib:.2f}",
        )
    console.print(table)


@click.command()
@click.option("--ranks", "num_ranks", type=int, help="Real gloo ranks instead of simulated ones.")
@click.option("--rounds", "num_rounds", default=60, show_default=True)
@click.option("--workload", "names", multiple=True, help="explicit, TP, FSDP2 or DDP; all of them.")
@click.option("--inside", "is_inside", is_flag=True, help="Measure the tracer where it is called.")
@click.option("--collectives", type=int, help="Measure memory and disk over so many, not time.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write JSON here.")
def main(
    num_ranks: int | None,
    num_rounds: int,
    names: tuple[str, ...],
    is_inside: bool,
    collectives: int | None,
    json_path: Path | None,
) -> None:
    """Measure what a stream adds to each collective."""
    if num_ranks is not None and "RANK" not in os.environ:
        sys.exit(start_ranks(num_ranks, sys.argv[1:]))
    if num_ranks is None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_SIMULATED)
        group = f"fake group of {NUM_SIMULATED}"
    else:
        dist.init_process_group("gloo")
        group = f"gloo group of {num_ranks}"
    if collectives is not None:
        rows = measure_growth(collectives)
        if dist.get_rank() == 0:
            print_growth(rows, group)
        dist.destroy_process_group()
        return
    costs = measure_rank(names, num_rounds, is_inside=is_inside)
    if dist.get_rank() == 0:
        print_report(costs, group)
        if json_path is not None:
            data = {"group": group, "costs": [asdict(cost) for cost in costs]}
            json_path.write_text(json.dumps(data, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
