"""What explain costs: explaining a function ÷ compiling it with the eager backend, in one run.

    python benchmarks/explain.py
    python benchmarks/explain.py --rounds 40

Each round compiles every function afresh by each means, in turn. *Known* is explain after the same
function was compiled in this process: what hangs on it must be set aside first. The bar is 1.3.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from shardscope import explain

BAR = 1.3
EAGER, AGAIN, OURS, KNOWN = "eager", "eager, again", "explain", "explain, known"


def a_hundred_ops(x: torch.Tensor) -> torch.Tensor:
    for _ in range(25):
        x = (torch.relu(x) + 1).sin() * 0.5
    return x


def with_breaks(x: torch.Tensor) -> torch.Tensor:
    x = _talk(x + 1)
    x = x * x.sum().item()
    x = x.sin() if x.mean() > 0 else x.cos()
    return _talk(x).relu()


def _talk(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    print(end="")
    return x + 1


def make_transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 4)


def compile_eagerly(function: Callable[..., Any], x: torch.Tensor) -> float:
    torch._dynamo.reset()
    return _time(lambda: torch.compile(function, backend="eager")(x))


def explain_afresh(function: Callable[..., Any], x: torch.Tensor) -> float:
    torch._dynamo.reset()
    return _time(lambda: explain(function, x))


def explain_known(function: Callable[..., Any], x: torch.Tensor) -> float:
    torch._dynamo.reset()
    torch.compile(function, backend="eager")(x)
    return _time(lambda: explain(function, x))


def _time(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


MEANS = {
    EAGER: compile_eagerly,
    AGAIN: compile_eagerly,
    OURS: explain_afresh,
    KNOWN: explain_known,
}


@click.command()
@click.option("--rounds", default=20, show_default=True)
def main(rounds: int) -> None:
    torch.manual_seed(0)
    subjects: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
        "100 ops": (a_hundred_ops, torch.randn(8, 64)),
        "transformer, 4 layers": (make_transformer(), torch.randn(2, 16, 64)),
        "with breaks": (with_breaks, torch.randn(8, 64)),
    }
    times: dict[tuple[str, str], list[float]] = {}
    for number in track(range(rounds + 1), "compiling"):
        for name, (function, x) in subjects.items():
            for means, run in MEANS.items():
                taken = run(function, x)
                if number:  # the first finds everything cold
                    times.setdefault((name, means), []).append(taken)
    _print(subjects, times, rounds)


def _print(subjects: Any, times: dict[tuple[str, str], list[float]], rounds: int) -> None:
    version = f"torch {torch.__version__}, Python {platform.python_version()}"
    title = f"{datetime.now(UTC):%Y-%m-%d}: {version}, {torch.get_num_threads()} threads"
    table = Table(title=f"{title}, {rounds} rounds")
    for column in ("function", EAGER, *(f"{one} ÷ eager" for one in (AGAIN, OURS, KNOWN))):
        table.add_column(column)
    for name in subjects:
        base = times[name, EAGER]
        cells = [_describe_ratio(times[name, one], base) for one in (AGAIN, OURS, KNOWN)]
        table.add_row(name, f"{statistics.median(base) * 1e3:.0f} ms", *cells)
    Console().print(table)
    worst = max(_ratio(times[name, OURS], times[name, EAGER]) for name in subjects)
    Console().print(f"bar {BAR}: {'kept' if worst <= BAR else 'missed'} (worst {worst:.2f})")


def _ratios(some: list[float], base: list[float]) -> list[float]:
    return [one / other for one, other in zip(some, base, strict=True)]


def _ratio(some: list[float], base: list[float]) -> float:
    return statistics.median(_ratios(some, base))


def _describe_ratio(some: list[float], base: list[float]) -> str:
    low, middle, high = statistics.quantiles(_ratios(some, base), n=4)
    return f"{middle:.2f} ({low:.2f} – {high:.2f})"


if __name__ == "__main__":
    main()
