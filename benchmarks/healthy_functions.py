"""Sixty functions that compilers get right, and that a hasty judge might call wrong or hung.

    python benchmarks/healthy_functions.py              # on the machine as it is
    python benchmarks/healthy_functions.py --busy 8     # beside eight processes that never rest
    python benchmarks/healthy_functions.py --only hessian,tied

Each is diagnosed as a user would. A verdict that something is wrong, or an error, is a false alarm;
the exit code is 1 if there is one. Functions with gradients have a backward that is compiled during
its first call. The functions change their arguments and globals, draw random numbers, break graphs,
return NaN, alias memory, or are slow.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import itertools
import json
import multiprocessing
import platform
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from shardscope import diagnose

OUT = Console(width=150)
CASES: dict[str, Case] = {}


@dataclasses.dataclass(frozen=True)
class Case:
    """How to make a function and its arguments, and how to compile it."""

    make: Callable[[], tuple[Any, ...]]
    backend: str
    dynamic: bool | None


def healthy(
    backend: str = "inductor", *, dynamic: bool | None = None
) -> Callable[[Callable[[], tuple[Any, ...]]], Callable[[], tuple[Any, ...]]]:
    def add(make: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
        CASES[make.__name__] = Case(make, backend, dynamic)
        return make

    return add


def grad(*size: int) -> Tensor:
    return torch.randn(*size, requires_grad=True)


# ── Models, forward and backward ─────────────────────────────────────────────────────────────


@healthy()
def perceptron() -> tuple[Any, ...]:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)), grad(8, 16)


@healthy("aot_eager")
def normalized() -> tuple[Any, ...]:
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.Softmax(-1)), grad(4, 32)


@healthy()
def batch_norm_in_training() -> tuple[Any, ...]:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()), grad(16, 8)


@healthy("aot_eager")
def batch_norm_of_all_batches() -> tuple[Any, ...]:
    return nn.BatchNorm2d(3, momentum=None), torch.randn(4, 3, 5, 5)


@healthy()
def dropout() -> tuple[Any, ...]:
    return nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)), grad(8, 16)


@healthy()
def attention() -> tuple[Any, ...]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend, *(grad(2, 2, 8, 16) for _ in range(3))


@healthy("aot_eager")
def encoder() -> tuple[Any, ...]:
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), grad(2, 5, 16)


@healthy("aot_eager")
def convolution() -> tuple[Any, ...]:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2)), grad(2, 3, 12, 12)


@healthy("aot_eager")
def recurrent() -> tuple[Any, ...]:
    cell = nn.GRUCell(4, 6)

    def run(steps: Tensor) -> Tensor:
        state = steps.new_zeros(steps.shape[1], 6)
        for step in steps:
            state = cell(step, state)
        return state

    return run, grad(5, 2, 4)


class TiedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=0)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), tokens.ravel())


@healthy()
def tied_weights() -> tuple[Any, ...]:
    return TiedWeights(), torch.randint(20, (3, 7))


@healthy("aot_eager")
def reparametrized() -> tuple[Any, ...]:
    return parametrizations.weight_norm(nn.Linear(6, 4)), grad(3, 6)


@healthy("aot_eager")
def hooked() -> tuple[Any, ...]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    return model, grad(3, 4)


@healthy("aot_eager")
def checkpointed() -> tuple[Any, ...]:
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh())
    return lambda x: checkpoint(layer, x, use_reentrant=False), grad(4, 8)


# ── Autograd out of the ordinary ─────────────────────────────────────────────────────────────


class Slow(torch.autograd.Function):
    """What takes its time, in Python, and more of it in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * x.cos()


@healthy()
def function_of_ones_own() -> tuple[Any, ...]:
    return lambda x: Slow.apply(x) * 2, grad(6)


@healthy("aot_eager")
def gradient_within() -> tuple[Any, ...]:
    def penalty(x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: (y.sin() * y).sum())(x).square().sum()

    return penalty, torch.randn(8)


@healthy("aot_eager")
def hessian() -> tuple[Any, ...]:
    return torch.func.hessian(lambda y: (y.sin() * y.flip(0)).sum()), torch.randn(5)


@healthy("aot_eager")
def vmapped() -> tuple[Any, ...]:
    return torch.vmap(lambda row, x: row.dot(x).exp(), in_dims=(0, None)), grad(4, 6), grad(6)


@healthy("aot_eager")
def backward_within() -> tuple[Any, ...]:
    layer = nn.Linear(3, 3)

    def step(x: Tensor) -> Tensor:
        loss = layer(x).square().mean()
        loss.backward()
        return loss.detach()

    return step, torch.randn(2, 3)


@healthy("aot_eager")
def partly_without_gradients() -> tuple[Any, ...]:
    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().amax()
        return x / scale + x.detach()

    return run, grad(3, 5)


@healthy("aot_eager")
def detached_and_not() -> tuple[Any, ...]:
    return lambda x: (x.sin(), x.cos().detach(), x.shape), grad(4)


@healthy("aot_eager")
def autocast() -> tuple[Any, ...]:
    layer = nn.Linear(16, 16)

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x).relu()

    return run, grad(4, 16)


# ── Memory and state ─────────────────────────────────────────────────────────────────────────


@healthy()
def written_to() -> tuple[Any, ...]:
    def run(x: Tensor) -> Tensor:
        x.mul_(2)
        return x[1:].add_(1).sin()

    return run, torch.randn(6)


@healthy("aot_eager")
def computed_and_written_to() -> tuple[Any, ...]:
    return lambda x: x.mul_(2).sin(), grad(4) * 3


@healthy("aot_eager")
def views_of_arguments() -> tuple[Any, ...]:
    return lambda x: (x, x.t(), x[0], x), torch.randn(3, 4)


@healthy("aot_eager")
def arguments_that_share_memory() -> tuple[Any, ...]:
    base = torch.randn(8)
    return lambda a, b: (a.add_(1), b.sum()), base[:4], base[2:]


@healthy("eager")
def containers() -> tuple[Any, ...]:
    def fill(table: dict[str, Any], queue: Any, x: Tensor) -> Tensor:
        table["y"] = [x * 2]
        queue.append(len(table))
        return table["y"][0] + queue[0]

    return fill, {"x": 1}, collections.deque([1, 2], maxlen=3), torch.randn(3)


class Counting(nn.Module):
    seen: list[int] = []  # noqa: RUF012 - shared by all on purpose

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        Counting.seen.append(self.num_calls)
        self.total += x.detach()
        return x * self.total


@healthy("aot_eager")
def counted() -> tuple[Any, ...]:
    return Counting(), grad(3)


NUM_CALLS = 0


@healthy("eager")
def counted_globally() -> tuple[Any, ...]:
    def run(x: Tensor) -> Tensor:
        global NUM_CALLS
        NUM_CALLS += 1
        return x + NUM_CALLS

    return run, torch.randn(3)


@healthy("eager")
def closure_that_counts() -> tuple[Any, ...]:
    count = 0

    def run(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x * count

    return run, torch.randn(3)


# ── Python ───────────────────────────────────────────────────────────────────────────────────


class Kind(enum.Enum):
    SINE = "sin"
    COSINE = "cos"


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclasses.dataclass
class Result:
    loss: Tensor
    name: str


@healthy("eager")
def rich_arguments() -> tuple[Any, ...]:
    def run(kind: Kind, pair: Pair, scale: float, name: str) -> Result:
        value = pair.left.sin() if kind is Kind.SINE else pair.left.cos()
        return Result((value * pair.right * scale).sum(), f"{name}!")

    return run, Kind.COSINE, Pair(grad(3), grad(3)), 0.5, "loss"


@healthy("eager")
def generator() -> tuple[Any, ...]:
    def run(x: Tensor) -> Tensor:
        return sum(part * place for place, part in enumerate(x.unbind()))  # type: ignore[return-value]

    return run, grad(4)


@healthy("eager")
def caught_error() -> tuple[Any, ...]:
    def run(x: Tensor, table: dict[str, int]) -> Tensor:
        try:
            return x * table["missing"]
        except KeyError:
            return x - 1

    return run, torch.randn(3), {"here": 1}


@healthy("aot_eager")
def data_dependent_branch() -> tuple[Any, ...]:
    def run(x: Tensor) -> Tensor:
        y = x.sin()
        return y * 2 if y.sum() > 0 else y / 2

    return run, grad(5)


@healthy("aot_eager")
def number_of_a_tensor() -> tuple[Any, ...]:
    return lambda x: x * x.abs().max().item(), torch.randn(5)


@healthy("eager")
def break_in_a_loop() -> tuple[Any, ...]:
    def run(x: Tensor) -> Tensor:
        for step in range(3):
            print(end="")
            x = x.sin() + step
        return x

    return run, grad(4)


@healthy("eager")
def recursive() -> tuple[Any, ...]:
    def run(x: Tensor, depth: int = 5) -> Tensor:
        return x if depth == 0 else run(x.sin(), depth - 1) + x

    return run, grad(3)


@healthy("eager")
def method_and_partial() -> tuple[Any, ...]:
    class Scale:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def apply(self, x: Tensor, shift: float) -> Tensor:
            return x * self.factor + shift

    return functools.partial(Scale(3.0).apply, shift=1.0), grad(3)


@healthy("eager")
def slow_in_python() -> tuple[Any, ...]:
    def run(x: Tensor) -> Tensor:
        time.sleep(1.5)
        return x + 1

    return run, torch.randn(3)


@healthy("aot_eager")
def many_small_steps() -> tuple[Any, ...]:
    def run(x: Tensor) -> Tensor:
        for step in range(150):
            x = x * 0.99 + step * 1e-3
        return x

    return run, grad(16)


# ── Random numbers ───────────────────────────────────────────────────────────────────────────


@healthy()
def drawn_by_torch() -> tuple[Any, ...]:
    return lambda x: x + torch.rand(4) * torch.randn_like(x), torch.randn(4)


@healthy("eager")
def drawn_by_python() -> tuple[Any, ...]:
    return lambda x: x * random.random() + random.choice([1, 2, 3]), torch.randn(3)


@healthy("aot_eager")
def shuffled() -> tuple[Any, ...]:
    return lambda x: x[torch.randperm(len(x))] * 2, torch.arange(12.0)


# ── Numbers ──────────────────────────────────────────────────────────────────────────────────


@healthy()
def not_a_number() -> tuple[Any, ...]:
    return lambda x: (x / x, x.log(), 1 / x), torch.tensor([0.0, -1.0, 2.0])


@healthy()
def masked_softmax() -> tuple[Any, ...]:
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    return lambda x: x.masked_fill(mask, -torch.inf).softmax(-1), grad(6, 6)


@healthy()
def long_sum() -> tuple[Any, ...]:
    return lambda x: (x.sum(), x.cumsum(0)[-1], x.mean()), torch.randn(40_000) + 10


@healthy("aot_eager")
def cancellation() -> tuple[Any, ...]:
    return lambda x: ((x + 1e4) - 1e4).var() + (x.exp() - 1), torch.randn(64) * 1e-3


@healthy("aot_eager")
def half_precision() -> tuple[Any, ...]:
    weight = torch.randn(64, 64, dtype=torch.bfloat16)
    return lambda x: functional.silu(x @ weight).sum(-1), torch.randn(8, 64, dtype=torch.bfloat16)


@healthy("aot_eager")
def float16_softmax() -> tuple[Any, ...]:
    return lambda x: (x * 30).softmax(-1).log(), torch.randn(4, 50, dtype=torch.float16)


@healthy("aot_eager")
def integers_that_wrap() -> tuple[Any, ...]:
    x = torch.tensor([250, 5, 130], dtype=torch.uint8)
    return lambda x: (x + 10, x // 3, x.to(torch.int8), x << 1), x


@healthy("aot_eager")
def complex_numbers() -> tuple[Any, ...]:
    return lambda x: torch.fft.ifft(torch.fft.fft(x) * 1j).abs(), torch.randn(16)


@healthy("aot_eager")
def ties() -> tuple[Any, ...]:
    x = torch.tensor([3, 1, 3, 2, 1, 3])
    return lambda x: (x.sort(stable=True).values, x.max(), x.topk(2).values), x


@healthy("aot_eager")
def scattered() -> tuple[Any, ...]:
    index = torch.tensor([0, 1, 0, 2, 1, 0])
    return lambda x: torch.zeros(3).index_add(0, index, x).relu(), grad(6)


@healthy("aot_eager")
def interpolated() -> tuple[Any, ...]:
    return lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"), grad(1, 2, 5, 5)


# ── Sizes and kinds of tensors ───────────────────────────────────────────────────────────────


@healthy(dynamic=True)
def open_sizes() -> tuple[Any, ...]:
    return lambda x: x.view(-1, x.shape[1] // 2).sum(0) / x.shape[0], grad(6, 8)


@healthy("aot_eager")
def marked_sizes() -> tuple[Any, ...]:
    x = torch.randn(5, 4)
    torch._dynamo.mark_dynamic(x, 0)
    return lambda x: torch.cat([x, x.new_zeros(x.size(0), 1)], 1).cos(), x


@healthy("aot_eager")
def size_of_a_result() -> tuple[Any, ...]:
    return lambda x: (x.nonzero(), x[x > 0].sum(), x.unique()), torch.randn(9).round()


@healthy("aot_eager")
def empty_and_scalar() -> tuple[Any, ...]:
    return lambda x, y: (x.sum(), torch.cat([x, x]), y * 2), torch.randn(0, 3), torch.tensor(2.0)


@healthy("aot_eager")
def nested() -> tuple[Any, ...]:
    parts = [torch.randn(2, 4), torch.randn(3, 4)]
    return lambda x: (x * 2).sin(), torch.nested.nested_tensor(parts, layout=torch.jagged)


@healthy("eager")
def sparse_and_arrays() -> tuple[Any, ...]:
    def run(matrix: Tensor, array: Any) -> Any:
        return matrix.to_dense() * 2, array * 2 + 1

    return run, torch.eye(3).to_sparse(), numpy.arange(3.0)


@healthy("aot_eager")
def odd_strides() -> tuple[Any, ...]:
    def run(x: Tensor) -> Tensor:
        return x.t()[::2].contiguous() + x.permute(1, 0)[::2].flip(0)

    return run, torch.randn(5, 8)[:, ::2]


# ── Running them ─────────────────────────────────────────────────────────────────────────────


def spin() -> None:
    for _ in itertools.count():
        pass


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Processes that use whatever the machine gives them."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
            process.join()


def examine(name: str, backend: str) -> tuple[str, bool, str, str, float]:
    """A name, whether the verdict is right, the verdict, what is said about it, and seconds."""
    warnings.simplefilter("ignore")
    start = time.monotonic()
    is_right, verdict, text = judge(CASES[name], backend)
    return name, is_right, verdict, text, time.monotonic() - start


def judge(case: Case, backend: str) -> tuple[bool, str, str]:
    torch.manual_seed(0)
    random.seed(0)
    fn, *args = case.make()
    with tempfile.TemporaryDirectory(prefix="healthy-") as folder:
        try:
            found = diagnose(
                fn,
                *args,
                backend=backend or case.backend,
                dynamic=case.dynamic,
                folder=Path(folder) / "found",
            ).diagnosis
        except Exception as error:  # noqa: BLE001 - whatever it is, it is no verdict
            return False, type(error).__name__, str(error)
    notes = [found.fact] if found.condition.is_bad else []
    return not found.condition.is_bad, str(found.condition), " ".join([*notes, *found.notes])


@click.command(help=__doc__.splitlines()[0])
@click.option("--busy", default=0, help="Number of processes that keep the machine busy.")
@click.option("--only", default="", help="Parts of names, separated by commas.")
@click.option("--backend", default="", help="Compile all of them with this one.")
@click.option("--jobs", default=1, help="Number of diagnoses at a time.")
def main(busy: int, only: str, backend: str, jobs: int) -> None:
    chosen = [name for name in CASES if any(part in name for part in only.split(","))]
    table = Table("function", "backend", "verdict", "seconds", "what is said", box=None)
    num_wrong, begun = 0, time.monotonic()
    context = multiprocessing.get_context("spawn")
    with busy_processes(busy), ProcessPoolExecutor(jobs, context) as pool:
        futures = [pool.submit(examine, name, backend) for name in chosen]
        for future in as_completed(futures):
            name, is_right, verdict, text, seconds = future.result()
            num_wrong += not is_right
            table.add_row(
                name, backend or CASES[name].backend, verdict, f"{seconds:.1f}", text[:200]
            )
            print(json.dumps([name, verdict, round(seconds, 1)]), file=sys.stderr, flush=True)
    OUT.print(table)
    OUT.print(
        f"{len(chosen)} functions, {num_wrong} false alarms; {busy} busy processes, {jobs} "
        f"diagnoses at a time, {time.monotonic() - begun:.0f} s; torch {torch.__version__}, Python "
        f"{platform.python_version()}"
    )
    sys.exit(1 if num_wrong else 0)


if __name__ == "__main__":
    main()
