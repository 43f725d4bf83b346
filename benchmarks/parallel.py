"""What a parallel program costs: its steps against others', and making it.

    python benchmarks/parallel.py steps          # ÷ written by hand, and eager DTensor ÷ it
    python benchmarks/parallel.py transform      # by layers and by axes, a 70B Llama on meta
    python benchmarks/parallel.py proofs         # verification and parity of a small model
    python benchmarks/parallel.py accelerator    # host time of steps on CUDA, bf16

Steps are one process on one thread: the ranks are torch's fake group, whose collectives cost
nothing but their dispatch. Contenders take turns; every figure is a median over rounds with its
quartiles, and a ratio is taken within a round. On a CPU the clock is the thread's own, so that
others on the machine count less.
"""

from __future__ import annotations

import copy
import gc
import json
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import click
import torch
import torch.distributed as dist
from parallel_models import DTENSOR_PLANS, MODELS, PLANS, ByHand, loss
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardscope import parity
from shardscope.cli._llama import LLAMA_8B, LLAMA_TINY, Llama
from shardscope.parallel import Colwise, Rowwise, Shard
from shardscope.parallel.api import parallelize

BY_HAND = "by hand"
AGAIN = "by hand, again"
DTENSOR = "eager DTensor"
CONSOLE = Console(width=120)

Step = Callable[[], object]


# ── Steps ────────────────────────────────────────────────────────────────────────────────────


# Two ways to the same numbers: a bias that is added before or after a sum is rounded otherwise.
_NEAR = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 5e-2, "atol": 5e-2},
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One model on one rank of a mesh, with what it is called on."""

    name: str
    dim: int
    mesh: DeviceMesh
    dtype: torch.dtype = torch.float32

    def make(self) -> tuple[nn.Module, Tensor, Tensor]:
        torch.manual_seed(0)
        options: dict[str, Any] = {"device": self.mesh.device_type, "dtype": self.dtype}
        model = MODELS[self.name](self.dim).to(**options)
        x, target = (torch.randn(2, 16, self.dim, **options) for _ in range(2))
        return model, x, target

    def by_hand(self, state: Any, *, trains: bool) -> ByHand:
        group = self.mesh.get_group().group_name
        return ByHand(self.name, state, dim=self.dim, group=group, trains=trains)

    def in_dtensors(self, model: nn.Module) -> nn.Module:
        return parallelize_module(copy.deepcopy(model), self.mesh, DTENSOR_PLANS[self.name])

    def forwards(self) -> dict[str, Step]:
        """A forward pass by everyone, without gradients."""
        model, x, _ = self.make()
        program = parallelize(model, self.mesh, PLANS[self.name], args=(x,), verify=False)
        ours, torchs = program.module(), program.exported().module()
        hand = self.by_hand(ours.state_dict(), trains=False)
        eager = self.in_dtensors(model)
        with torch.no_grad():
            torch.testing.assert_close(ours(x), hand(x), **_NEAR[x.dtype])
        return {
            BY_HAND: lambda: hand(x),
            AGAIN: lambda: hand(x),
            "transformed": lambda: ours(x),
            "its ExportedProgram": lambda: torchs(x),
            DTENSOR: lambda: eager(x),
        }

    def trainings(self) -> dict[str, Step]:
        """A forward and backward pass by everyone."""
        model, x, target = self.make()
        program = parallelize(
            model,
            self.mesh,
            PLANS[self.name],
            args=(x,),
            loss=loss,
            targets=(target,),
            verify=False,
        )
        ours: Any = program.module()
        hand = self.by_hand(ours.state_dict(), trains=True)
        eager = self.in_dtensors(model)
        steps = {
            BY_HAND: partial(_differentiate, hand, x, target),
            AGAIN: partial(_differentiate, hand, x, target),
            "transformed, step()": lambda: ours.step(x, target),
            "transformed, backward()": lambda: ours(x, target).backward(),
            DTENSOR: partial(_differentiate, eager, x, target),
        }
        parameters = {DTENSOR: list(eager.parameters())}
        parameters |= {name: list(hand.weights.values()) for name in (BY_HAND, AGAIN)}
        _check_gradients(steps, hand, ours)
        return {
            name: partial(_afresh, parameters.get(name, list(ours.parameters())), step)
            for name, step in steps.items()
        }


def _differentiate(model: Callable[[Tensor], Tensor], x: Tensor, target: Tensor) -> None:
    loss(model(x), target).backward()


def _afresh(parameters: list[Tensor], step: Step) -> None:
    for one in parameters:
        one.grad = None
    step()


def _check_gradients(steps: dict[str, Step], hand: ByHand, ours: nn.Module) -> None:
    """What is compared computes the same."""
    steps[BY_HAND]()
    for name in ("transformed, step()", "transformed, backward()"):
        ours.zero_grad()
        steps[name]()
        for key, one in ours.named_parameters():
            torch.testing.assert_close(one.grad, hand.weights[key].grad, **_NEAR[one.dtype])


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Times of one contender in µs, round by round."""

    ours: list[float]
    wall: list[float]


def compete(steps: dict[str, Step], *, num_rounds: int, device: str) -> dict[str, Timed]:
    """Rounds in which everyone steps, in an order of their own: nobody always follows another."""
    names, dice = list(steps), random.Random(0)
    for step in steps.values():
        step()
        step()
    num_steps = _steps_per_turn(steps[BY_HAND])
    found = {name: Timed(ours=[], wall=[]) for name in names}
    for _ in range(num_rounds):
        with paused_gc():
            for name in dice.sample(names, k=len(names)):
                ours, wall = _time(steps[name], num_steps, device)
                found[name].ours.append(ours)
                found[name].wall.append(wall)
    return found


def _steps_per_turn(step: Step) -> int:
    start = time.perf_counter()
    step()
    return max(1, min(20, int(0.004 / (time.perf_counter() - start))))


def _time(step: Step, num_steps: int, device: str) -> tuple[float, float]:
    """The thread's time and the wall's, in µs a step; on CUDA until the host is done."""
    step()  # nobody pays for what the contender before left cold
    if device == "cuda":
        torch.cuda.synchronize()
    begun, wall = time.thread_time_ns(), time.perf_counter_ns()
    for _ in range(num_steps):
        step()
    ended, wall_ended = time.thread_time_ns(), time.perf_counter_ns()
    if device == "cuda":
        torch.cuda.synchronize()
        # Backward has a thread of its own there.
        return ((wall_ended - wall) / num_steps / 1e3,) * 2
    return (ended - begun) / num_steps / 1e3, (wall_ended - wall) / num_steps / 1e3


@contextmanager
def paused_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def ratio(over: Sequence[float], under: Sequence[float]) -> str:
    """The median of the rounds' ratios, and their quartiles."""
    ratios = [one / other for one, other in zip(over, under, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} – {high:.2f})"


def steps_table(title: str) -> Table:
    table = Table(title=title)
    table.add_column("workload")
    table.add_column("contender")
    for header in ("µs", "÷ by hand", "eager ÷ it", "by wall clock"):
        table.add_column(header, justify="right")
    return table


def add_rows(table: Table, name: str, timed: dict[str, Timed]) -> None:
    hand, eager = timed[BY_HAND], timed[DTENSOR]
    for contender, one in timed.items():
        is_ours = contender.startswith("transformed")
        walls = [(one.wall, hand.wall), *([(eager.wall, one.wall)] if is_ours else [])]
        table.add_row(
            name if contender == BY_HAND else "",
            contender,
            f"{statistics.median(one.ours):.0f}",
            ratio(one.ours, hand.ours),
            ratio(eager.ours, one.ours) if is_ours else "",
            ", ".join(ratio(*two).split()[0] for two in walls),
            end_section=contender == DTENSOR,
        )


def run_steps(
    mesh: DeviceMesh, dims: Sequence[int], *, num_rounds: int, dtype: torch.dtype, title: str
) -> None:
    device = mesh.device_type
    table = steps_table(title)
    for dim in dims:
        for name in MODELS if device == "cpu" else ("block",):
            work = Workload(name=name, dim=dim, mesh=mesh, dtype=dtype)
            with torch.no_grad():
                forward = compete(work.forwards(), num_rounds=num_rounds, device=device)
            add_rows(table, f"{name} d={dim}, forward", forward)
            training = compete(work.trainings(), num_rounds=num_rounds, device=device)
            add_rows(table, f"{name} d={dim}, and backward", training)
    CONSOLE.print(table)


@contextmanager
def fake_group(num_ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ── Transforming ─────────────────────────────────────────────────────────────────────────────

LLAMA_70B = replace(
    LLAMA_8B, dim=8192, num_layers=80, num_heads=64, hidden_dim=28672, max_seq_len=2048
)
LLAMA_PLAN = {
    "layers.*.attention.w[qkv]": Colwise(),
    "layers.*.attention.wo": Rowwise(),
    "layers.*.feed_forward.w[13]": Colwise(),
    "layers.*.feed_forward.w2": Rowwise(),
    "tok_embeddings": Rowwise(),
    "output": Colwise(output=Shard(-1)),
}
MESHES = ("tp=8", "dp=2,tp=8", "pp=2,dp=2,tp=8")
LAYERS = (5, 10, 20, 40, 80)


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(tokens)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def transform(num_layers: int, mesh: str, *, trains: bool) -> dict[str, float]:
    """Seconds of each part, and the peak of this process."""
    with torch.device("meta"):
        model: nn.Module = Llama(replace(LLAMA_70B, num_layers=num_layers))
        tokens = torch.zeros(8, 2048, dtype=torch.long)
    plan: dict[str, Any] = dict(LLAMA_PLAN)
    names = ["tokens", "labels"] if trains else ["tokens"]
    if trains:
        model, plan = WithLoss(model), {f"model.{name}": one for name, one in plan.items()}
    inputs = {name: {"dp": Shard(0)} for name in names} if "dp" in mesh else None
    clock = _Clock()
    program = torch.export.export(model, (tokens,) * len(names), strict=False)
    clock.note("export")
    made = parallelize(program, mesh, plan, inputs=inputs, training=trains, verify=False)
    clock.note("parallelize")
    made.joint(0) if trains else made.exported(0)
    clock.note("write")
    clock.found["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    clock.found["moves"] = len(made.moves)
    clock.found["billions"] = sum(one.numel() for one in model.parameters()) / 1e9
    return clock.found


class _Clock:
    """Seconds since the last note, by the thread's clock and the wall's."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self._last = self._now()

    def note(self, name: str) -> None:
        now = self._now()
        self.found[name], self.found[f"{name}_wall"] = (
            one - other for one, other in zip(now, self._last, strict=True)
        )
        self._last = self._now()

    def _now(self) -> tuple[float, float]:
        return time.thread_time(), time.perf_counter()


def in_a_process(num_layers: int, mesh: str, *, trains: bool) -> dict[str, float]:
    """One transform in a process of its own, so that nothing is remembered from the one before."""
    command = [sys.executable, __file__, "one", str(num_layers), mesh]
    done = subprocess.run(
        [*command, *(["--trains"] if trains else [])], check=True, capture_output=True, text=True
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def show_transforms(runs: Sequence[tuple[int, str, bool]]) -> None:
    table = Table(title="Transforming a Llama of the 70B model's width on meta, 8 × 2,048 tokens")
    headers = ("layers", "mesh", "place s", "write s", "both s", "by wall s")
    for header in (*headers, "÷ first", "export s", "peak MiB", "parameters"):
        table.add_column(header, justify="right")
    first = 0.0
    for num_layers, mesh, trains in runs:
        one = in_a_process(num_layers, mesh, trains=trains)
        both = one["parallelize"] + one["write"]
        first = first or both
        table.add_row(
            str(num_layers),
            f"{mesh}{' joint' if trains else ''}",
            f"{one['parallelize']:.2f}",
            f"{one['write']:.2f}",
            f"{both:.2f}",
            f"{one['parallelize_wall'] + one['write_wall']:.2f}",
            f"{both / first:.2f}",
            f"{one['export']:.1f}",
            f"{one['peak_mib']:.0f}",
            f"{one['billions']:.1f}B",
        )
    CONSOLE.print(table)


# ── Proofs ───────────────────────────────────────────────────────────────────────────────────


def time_proofs(num_rounds: int) -> None:
    """How long a look at all ranks takes, beside making them."""
    torch.manual_seed(0)
    model = Llama(LLAMA_TINY)
    tokens = torch.randint(0, LLAMA_TINY.vocab_size, (2, 16))

    def lose(logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    program = partial(parallelize, model, "tp=4", LLAMA_PLAN, args=(tokens,))
    trained = partial(program, loss=lose, targets=(tokens,))
    calls: dict[str, Step] = {
        "parallelize, not verified": partial(program, verify=False),
        "parallelize, verified": program,
        "for training, not verified": partial(trained, verify=False),
        "for training, verified": trained,
        "parity": partial(parity, model, {"tp": 4}, LLAMA_PLAN, inputs=(tokens,)),
        "parity with a loss": partial(
            parity,
            model,
            {"tp": 4},
            LLAMA_PLAN,
            inputs=(tokens,),
            loss=lambda out: out.square().mean(),
        ),
    }
    table = Table(title="A 2-layer Llama (d=64), four ranks in one process")
    table.add_column("call")
    table.add_column("s, of the thread", justify="right")
    for name, call in calls.items():
        call()
        times = [_time(call, 1, "cpu")[0] / 1e6 for _ in range(num_rounds)]
        table.add_row(name, f"{statistics.median(times):.2f}")
    CONSOLE.print(table)


# ── Commands ─────────────────────────────────────────────────────────────────────────────────


def describe_machine(device: str = "cpu") -> str:
    chip = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    when = datetime.now(UTC).date()
    return f"{when}, torch {torch.__version__}, Python {platform.python_version()}, {chip}"


@click.group()
def main() -> None:
    """Measure parallel programs."""
    torch.set_num_threads(1)


@main.command()
@click.option("--dim", "dims", type=int, multiple=True, default=(64, 256, 512), show_default=True)
@click.option("--rounds", "num_rounds", default=40, show_default=True)
def steps(dims: tuple[int, ...], num_rounds: int) -> None:
    """Steps on the CPU, as rank 0 of a fake group of eight."""
    with fake_group(8):
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
        title = "Steps, 2 × 16 tokens, rank 0 of 8"
        run_steps(mesh, dims, num_rounds=num_rounds, dtype=torch.float32, title=title)
    CONSOLE.print(describe_machine())


@main.command("transform")
@click.option("--layers", type=int, multiple=True, default=LAYERS, show_default=True)
@click.option("--joint-layers", type=int, multiple=True, default=(20, 80), show_default=True)
def transform_command(layers: tuple[int, ...], joint_layers: tuple[int, ...]) -> None:
    """Seconds and memory of `parallelize` and of writing one rank's program."""
    show_transforms([(one, MESHES[0], False) for one in layers])
    show_transforms([(20, mesh, False) for mesh in MESHES])
    show_transforms([(one, MESHES[0], True) for one in joint_layers])
    CONSOLE.print(describe_machine())


@main.command("one", hidden=True)
@click.argument("num_layers", type=int)
@click.argument("mesh")
@click.option("--trains", is_flag=True)
def one_command(num_layers: int, mesh: str, trains: bool) -> None:
    """Print one transform as JSON."""
    click.echo(json.dumps(transform(num_layers, mesh, trains=trains)))


@main.command()
@click.option("--rounds", "num_rounds", default=5, show_default=True)
def proofs(num_rounds: int) -> None:
    """Seconds of verification and of parity."""
    time_proofs(num_rounds)
    CONSOLE.print(describe_machine())


@main.command()
@click.option("--dim", "dims", type=int, multiple=True, default=(1024, 4096), show_default=True)
@click.option("--rounds", "num_rounds", default=30, show_default=True)
def accelerator(dims: tuple[int, ...], num_rounds: int) -> None:
    """Host time of steps on CUDA in bf16: alone with NCCL, and as rank 0 of a fake group of 8."""
    if not torch.cuda.is_available():
        raise click.ClickException("there is no CUDA device here. Run the section where one is.")
    for title, group in {
        "alone, NCCL": lonely_group,
        "rank 0 of 8": partial(fake_group, 8),
    }.items():
        with group():
            mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("tp",))
            title = f"Host time of steps, bf16, 2 × 16 tokens, {title}"
            run_steps(mesh, dims, num_rounds=num_rounds, dtype=torch.bfloat16, title=title)
    CONSOLE.print(describe_machine("cuda"))


@contextmanager
def lonely_group() -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
