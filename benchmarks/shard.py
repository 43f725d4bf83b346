"""What looking at a large model costs: time by number of layers, and peak memory.

    python benchmarks/shard.py coverage                 # 10, 20, 40, 80 layers of an 8B Llama
    python benchmarks/shard.py coverage --layers 80
    python benchmarks/shard.py audit                    # of the same, sharded over 1,024 ranks

The model is on meta. Each size runs in a process of its own, so that its peak is its own and
nothing is remembered from the size before.
"""

from __future__ import annotations

import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from shardscope import audit, coverage, simulate
from shardscope.cli._llama import LLAMA_8B, Llama, parallelize

SEQ_LEN = 2048
LAYERS = (10, 20, 40, 80)


def build(num_layers: int) -> tuple[Llama, torch.Tensor]:
    """A Llama of the 8B model's width, and a batch, both on meta."""
    with torch.device("meta"):
        model = Llama(replace(LLAMA_8B, num_layers=num_layers))
        return model, torch.zeros(1, SEQ_LEN, dtype=torch.long)


def cover(num_layers: int) -> dict[str, Any]:
    """Coverage at all three levels."""
    model, tokens = build(num_layers)
    start = time.perf_counter()
    recording = coverage(model, tokens)
    return {
        "seconds": time.perf_counter() - start,
        "found": {str(one.level): len(one.ops) for one in recording.coverage},
    }


def look(num_layers: int) -> dict[str, Any]:
    """An audit of the model under FSDP2 and tensor parallelism, on dp=128 × tp=8."""
    with simulate(mesh={"dp": 128, "tp": 8}) as world:
        model, _ = build(num_layers)
        parallelize(model, world.mesh)
        start = time.perf_counter()
        recording = audit(model)
        return {
            "seconds": time.perf_counter() - start,
            "found": {"modules": len(recording.modules), "findings": len(recording.findings)},
        }


SECTIONS: dict[str, Callable[[int], dict[str, Any]]] = {"audit": look, "coverage": cover}


def measure(section: str, num_layers: int) -> dict[str, Any]:
    """One size of one section, in a process of its own."""
    command = [sys.executable, __file__, "one", section, str(num_layers)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def show(section: str, layers: Sequence[int]) -> None:
    """A table of all sizes."""
    table = Table(title=f"{section}, Llama of 8B width on meta, {SEQ_LEN} tokens")
    for header in ("layers", "seconds", "÷ the first", "layers ÷ the first", "peak MiB", "found"):
        table.add_column(header, justify="right")
    first: dict[str, Any] = {}
    for num_layers in layers:
        one = measure(section, num_layers)
        first = first or one
        table.add_row(
            str(num_layers),
            f"{one['seconds']:.2f}",
            f"{one['seconds'] / first['seconds']:.2f}",
            f"{num_layers / layers[0]:.2f}",
            f"{one['peak_mib']:.0f}",
            ", ".join(f"{name} {count}" for name, count in one["found"].items()),
        )
    console = Console(width=120)
    console.print(table)
    when = datetime.now(UTC).date()
    console.print(f"{when}, torch {torch.__version__}, Python {platform.python_version()}")


@click.group()
def main() -> None:
    """Measure what shardscope's look at a model costs."""


@main.command("audit")
@click.option("--layers", type=int, multiple=True, help="Numbers of layers, instead of four.")
def audit_command(layers: tuple[int, ...]) -> None:
    """Time and memory of `audit()`."""
    show("audit", layers or LAYERS)


@main.command("coverage")
@click.option("--layers", type=int, multiple=True, help="Numbers of layers, instead of four.")
def coverage_command(layers: tuple[int, ...]) -> None:
    """Time and memory of `coverage()`, at all three levels."""
    show("coverage", layers or LAYERS)


@main.command("one", hidden=True)
@click.argument("section", type=click.Choice(list(SECTIONS)))
@click.argument("num_layers", type=int)
def one_command(section: str, num_layers: int) -> None:
    """Print one measurement as JSON."""
    result = SECTIONS[section](num_layers)
    result["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    click.echo(json.dumps(result))


if __name__ == "__main__":
    main()
