"""What tracing costs: a step under each tracer ÷ the same step untraced, interleaved in one run.

    python benchmarks/comm_overhead.py                  # the ratios and what is retained per op
    python benchmarks/comm_overhead.py --simulated      # and the demo's step, at two world sizes
    python benchmarks/comm_overhead.py --device cuda    # on an accelerator, in bf16

Ranks are simulated by torch's fake group, so that every figure is one process on one thread.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import math
import platform
import statistics
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardscope import simulate, trace
from shardscope.cli._llama import (
    LLAMA_8B,
    Llama,
    LlamaConfig,
    batch,
    compute_gradients,
    make_optimizer,
    parallelize,
    train_step,
)

UNTRACED = "untraced"
COMM_DEBUG_MODE = "torch CommDebugMode"
TRACE = "shardscope trace"
NUM_RANKS = 8
NUM_STEPS = 4  # in each context


class EmptyMode(TorchDispatchMode):
    """The least that any tool built on a dispatch mode can cost."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


Contender = Callable[[nn.Module], AbstractContextManager[object]]

# The second untraced entry is the noise of this machine: read the others against it.
CONTENDERS: dict[str, Contender] = {
    UNTRACED: lambda model: nullcontext(),
    "untraced, again": lambda model: nullcontext(),
    "empty TorchDispatchMode": lambda model: EmptyMode(),
    COMM_DEBUG_MODE: lambda model: CommDebugMode(),
    "torch DebugMode": lambda model: DebugMode(),
    TRACE: trace,
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Forward and backward of a 4-layer Llama on one rank."""

    name: str
    model: Llama
    tokens: Tensor

    def step(self) -> None:
        self.model.zero_grad()
        compute_gradients(self.model, self.tokens)

    def describe(self) -> str:
        """Its size, and how much `trace` sees in it: seeing nothing would be cheap for nothing."""
        num_sequences, length = self.tokens.shape
        with trace(self.model) as seen:
            self.step()
        num_collectives = len(seen.recording.collectives)
        return f"{num_sequences} × {length - 1} tokens, {num_collectives} collectives"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The steps of one contender in one round."""

    enter_ms: float
    first_ms: float
    later_ms: float
    exit_ms: float


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """All steps of one contender on one workload; the ratios are to the same round's untraced.

    The first step in a context finds caches cold that later ones find warm, and has its own ratio.
    """

    workload: str
    shape: str
    contender: str
    ratio: float
    ratio_quartiles: tuple[float, float]
    first_ratio: float
    step_ms: float
    enter_ms: float
    exit_ms: float
    num_rounds: int


@dataclass(frozen=True, kw_only=True)
class Retained:
    """Python memory that a contender holds on to, inside one context, per op or step."""

    contender: str
    unit: str
    bytes_per_unit: float
    num_runs: int


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """One visit to a simulated world of the demo's model."""

    num_ranks: int
    num_collectives: int
    build_s: float
    first_s: float
    untraced_s: float
    traced_s: float


# ── Workloads ────────────────────────────────────────────────────────────────────────────────


def make_workloads(device: str) -> Iterator[Workload]:
    """Small enough to be all dispatch, and large enough to be all arithmetic."""
    small, large = (64, 512) if device == "cpu" else (256, 2048)
    yield make_workload(f"plain d={small}", dim=small, device=device, num_tokens=16)
    yield make_workload(f"FSDP2 d={small}", dim=small, device=device, num_tokens=16, axis="dp")
    yield make_workload(f"TP d={small}", dim=small, device=device, num_tokens=16, axis="tp")
    yield make_workload(f"plain d={large}", dim=large, device=device, num_tokens=64)
    if device == "cuda":
        yield make_workload(f"FSDP2 d={large}", dim=large, device=device, num_tokens=64, axis="dp")
        yield make_workload(f"TP d={large}", dim=large, device=device, num_tokens=64, axis="tp")


def make_workload(
    name: str, *, dim: int, device: str, num_tokens: int, axis: str | None = None
) -> Workload:
    config = LlamaConfig(
        dim=dim,
        num_layers=4,
        num_heads=8,
        num_kv_heads=8,
        hidden_dim=4 * dim,
        vocab_size=1024,
        max_seq_len=num_tokens,
    )
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" or axis == "dp" else torch.bfloat16
    model = Llama(config).to(device=device, dtype=dtype)
    if axis is not None:
        parallelize(model, init_device_mesh(device, (NUM_RANKS,), mesh_dim_names=(axis,)))
    return Workload(name=name, model=model, tokens=batch(model, num_sequences=2))


@contextmanager
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ── Overhead of a real step ──────────────────────────────────────────────────────────────────


def measure_overhead(
    workload: Workload, *, num_rounds: int, synchronize: Callable[[], None]
) -> list[Overhead]:
    def run_round(names: list[str]) -> dict[str, Sample]:
        return {name: time_steps(workload, name, synchronize) for name in names}

    names = list(CONTENDERS)
    for _ in range(3):
        run_round(names)
    rounds = []
    for index in track(range(num_rounds), workload.name, console=PROGRESS, transient=True):
        with paused_gc():
            # Each round starts with another contender: nobody always follows the same one.
            turn = index % len(names)
            rounds.append(run_round(names[turn:] + names[:turn]))
    shape = workload.describe()
    return [summarize(workload.name, shape, name, rounds) for name in names]


def time_steps(workload: Workload, name: str, synchronize: Callable[[], None]) -> Sample:
    # An untimed step first: nobody pays for what the contender before left cold.
    workload.step()
    if name == COMM_DEBUG_MODE:  # crashes when a module runs twice in its context
        contexts = [time_context(workload, name, 1, synchronize) for _ in range(NUM_STEPS)]
    else:
        contexts = [time_context(workload, name, NUM_STEPS, synchronize)]
    first, *later = [step_ms for _, steps_ms, _ in contexts for step_ms in steps_ms]
    return Sample(
        enter_ms=contexts[0][0],
        first_ms=first,
        later_ms=statistics.median(later),
        exit_ms=contexts[0][2],
    )


def time_context(
    workload: Workload, name: str, num_steps: int, synchronize: Callable[[], None]
) -> tuple[float, list[float], float]:
    """How long it takes to enter, to step, to step again, … and to leave."""
    synchronize()
    times = [time.perf_counter_ns()]
    with CONTENDERS[name](workload.model):
        times.append(time.perf_counter_ns())
        for _ in range(num_steps):
            workload.step()
            synchronize()
            times.append(time.perf_counter_ns())
    times.append(time.perf_counter_ns())
    enter, *steps, leave = [(end - begin) / 1e6 for begin, end in itertools.pairwise(times)]
    return enter, steps, leave


def summarize(workload: str, shape: str, name: str, rounds: list[dict[str, Sample]]) -> Overhead:
    samples = [samples[name] for samples in rounds]
    ratios = [samples[name].later_ms / samples[UNTRACED].later_ms for samples in rounds]
    first_ratios = [samples[name].first_ms / samples[UNTRACED].first_ms for samples in rounds]
    return Overhead(
        workload=workload,
        shape=shape,
        contender=name,
        ratio=statistics.median(ratios),
        ratio_quartiles=quartiles(ratios),
        first_ratio=statistics.median(first_ratios),
        step_ms=statistics.median(sample.later_ms for sample in samples),
        enter_ms=statistics.median(sample.enter_ms for sample in samples),
        exit_ms=statistics.median(sample.exit_ms for sample in samples),
        num_rounds=len(rounds),
    )


def quartiles(values: list[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return low, high


@contextmanager
def paused_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# ── Memory retained where there is nothing to record ─────────────────────────────────────────


def measure_all_retained(device: str) -> Iterator[Retained]:
    x = torch.ones(4, device=device)
    for name in CONTENDERS:
        yield measure_retained(
            name, unit="op", model=nn.Identity(), run=lambda: torch.add(x, x), num_runs=20_000
        )
    plain = next(make_workloads(device))
    for name in (UNTRACED, TRACE):  # CommDebugMode would crash on the second step
        yield measure_retained(
            name, unit="plain step", model=plain.model, run=plain.step, num_runs=50
        )


def measure_retained(
    name: str, *, unit: str, model: nn.Module, run: Callable[[], object], num_runs: int
) -> Retained:
    tracemalloc.start()
    try:
        with CONTENDERS[name](model):
            repeat(run, num_runs // 10)
            before = traced_bytes()
            repeat(run, num_runs)
            after = traced_bytes()
    finally:
        tracemalloc.stop()
    retained = (after - before) / num_runs
    return Retained(contender=name, unit=unit, bytes_per_unit=retained, num_runs=num_runs)


def repeat(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()


def traced_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


# ── The demo's simulated step ────────────────────────────────────────────────────────────────


def measure_simulated(*, num_layers: int, num_rounds: int) -> list[SimulatedStep]:
    config = replace(LLAMA_8B, num_layers=num_layers)
    worlds = [{"dp": 128, "tp": 8}, {"dp": 2048, "tp": 8}]
    for mesh in worlds:
        visit_world(config, mesh)  # torch caches what it learns about each world size
    visits = track(worlds * num_rounds, "simulated step", console=PROGRESS, transient=True)
    return [visit_world(config, mesh) for mesh in visits]


def visit_world(config: LlamaConfig, mesh: dict[str, int]) -> SimulatedStep:
    with simulate(mesh=mesh, rank=0) as world, paused_gc():
        begun = time.perf_counter()
        with torch.device("meta"):
            model = Llama(config)
        parallelize(model, world.mesh)
        world.materialize(model)
        optimizer, tokens = make_optimizer(model), batch(model)

        built = time.perf_counter()
        first_s = time_train_step(model, optimizer, tokens, UNTRACED)
        pairs = [
            [time_train_step(model, optimizer, tokens, name) for name in (UNTRACED, TRACE)]
            for _ in range(3)
        ]
        with trace(model) as seen:
            train_step(model, optimizer, tokens)
    untraced, traced = zip(*pairs, strict=True)
    return SimulatedStep(
        num_ranks=math.prod(mesh.values()),
        num_collectives=len(seen.recording.collectives),
        build_s=built - begun,
        first_s=first_s,
        untraced_s=statistics.median(untraced),
        traced_s=statistics.median(traced),
    )


def time_train_step(
    model: Llama, optimizer: torch.optim.Optimizer, tokens: Tensor, name: str
) -> float:
    with CONTENDERS[name](model):
        started = time.perf_counter()
        train_step(model, optimizer, tokens)
        return time.perf_counter() - started


def median_of(visits: list[SimulatedStep], num_ranks: int, field: str) -> float:
    return statistics.median(getattr(v, field) for v in visits if v.num_ranks == num_ranks)


# ── Report ───────────────────────────────────────────────────────────────────────────────────

PROGRESS = Console(stderr=True)


def describe_machine(device: str) -> dict[str, str]:
    chip = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{device} ({chip or platform.machine()}), one thread",
    }


def overhead_table(overheads: list[Overhead]) -> Table:
    table = Table(title="A 4-layer forward + backward inside each tracer ÷ untraced")
    for column in ("workload", "tracer"):
        table.add_column(column)
    for column in ("ratio", "quartiles", "first step", "step ms", "enter ms", "exit ms"):
        table.add_column(column, justify="right")
    for item in overheads:
        low, high = item.ratio_quartiles
        table.add_row(
            workload_cell(item),
            item.contender,
            f"{item.ratio:.2f}×",
            f"{low:.2f} – {high:.2f}",
            f"{item.first_ratio:.2f}×",
            f"{item.step_ms:.2f}",
            f"{item.enter_ms:.2f}",
            f"{item.exit_ms:.2f}",
            end_section=item.contender == list(CONTENDERS)[-1],
        )
    return table


def workload_cell(item: Overhead) -> str:
    names = list(CONTENDERS)
    return {names[0]: item.workload, names[1]: item.shape}.get(item.contender, "")


def retained_table(retained: list[Retained]) -> Table:
    table = Table(title="Python memory retained without a collective, inside one context")
    table.add_column("tracer")
    table.add_column("bytes", justify="right")
    table.add_column("per")
    for item in retained:
        table.add_row(item.contender, f"{item.bytes_per_unit:,.1f}", item.unit)
    return table


def simulated_table(visits: list[SimulatedStep]) -> Table:
    table = Table(title="The demo's simulated training step, medians")
    fields = ("num_collectives", "build_s", "first_s", "untraced_s", "traced_s")
    for column in ("ranks", *(field.replace("_", " ") for field in fields), "ratio"):
        table.add_column(column, justify="right")
    for num_ranks in sorted({visit.num_ranks for visit in visits}):
        ratios = [v.traced_s / v.untraced_s for v in visits if v.num_ranks == num_ranks]
        table.add_row(
            f"{num_ranks:,}",
            *(f"{median_of(visits, num_ranks, field):.4g}" for field in fields),
            f"{statistics.median(ratios):.2f}×",
        )
    ratios = world_size_ratios(visits)
    low, high = quartiles(ratios)
    table.caption = (
        f"16,384 ÷ 1,024 ranks, round by round: {statistics.median(ratios):.2f}× "
        f"({low:.2f} – {high:.2f})"
    )
    return table


def world_size_ratios(visits: list[SimulatedStep]) -> list[float]:
    pairs = zip(visits[0::2], visits[1::2], strict=True)
    return [large.untraced_s / small.untraced_s for small, large in pairs]


@click.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--rounds", "num_rounds", default=40, show_default=True, help="Rounds per workload.")
@click.option("--simulated", is_flag=True, help="Also time the demo's simulated step.")
@click.option("--layers", "num_layers", default=32, show_default=True, help="Of the demo's model.")
@click.option("--simulated-rounds", default=5, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write JSON here.")
def main(
    device: str,
    num_rounds: int,
    simulated: bool,
    num_layers: int,
    simulated_rounds: int,
    json_path: Path | None,
) -> None:
    """Measure what shardscope's trace and torch's own tracers add to a step."""
    torch.set_num_threads(1)
    quieten_torch()
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    with fake_group():
        overheads = [
            overhead
            for workload in make_workloads(device)
            for overhead in measure_overhead(
                workload, num_rounds=num_rounds, synchronize=synchronize
            )
        ]
    retained = list(measure_all_retained(device))
    visits = (
        measure_simulated(num_layers=num_layers, num_rounds=simulated_rounds) if simulated else []
    )
    print_report(device, overheads, retained, visits)
    if json_path is not None:
        results = {"overheads": overheads, "retained": retained, "simulated": visits}
        rows = {name: [asdict(item) for item in items] for name, items in results.items()}
        json_path.write_text(json.dumps({"machine": describe_machine(device), **rows}, indent=2))


def quieten_torch() -> None:
    # CommDebugMode's hooks make torch warn about every FSDP2 root and every embedding; DTensor
    # warns about the demo's gradient norm, which is reduced over two axes.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)


def print_report(
    device: str,
    overheads: list[Overhead],
    retained: list[Retained],
    visits: list[SimulatedStep],
) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(" · ".join(f"{key} {value}" for key, value in describe_machine(device).items()))
    console.print(overhead_table(overheads))
    console.print(retained_table(retained))
    if visits:
        console.print(simulated_table(visits))


if __name__ == "__main__":
    main()
