"""What sampling values costs: a training step under `trace(values=True)` ÷ the same step untraced.

    python benchmarks/value_overhead.py                  # a Llama of 4 layers on one thread
    python benchmarks/value_overhead.py --device cuda    # in bf16, on an accelerator

Steps are interleaved, and ratios are those of one round. Every sampled step is read at its end. On
the CPU time is that of the thread, which other processes do not change.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import click
import torch
from rich.console import Console
from rich.table import Table

from shardscope import trace
from shardscope.cli._llama import Llama, LlamaConfig, batch, compute_gradients

UNTRACED = "untraced"
CONTENDERS: dict[str, Callable[[torch.nn.Module], AbstractContextManager[object]]] = {
    UNTRACED: lambda model: nullcontext(),
    "untraced, again": lambda model: nullcontext(),
    "trace": trace,
    "trace, values=True": lambda model: trace(model, values=True),
}
NUM_STEPS = 3  # in each context


def make_step(device: str, dim: int, num_tokens: int) -> tuple[Llama, Callable[[], None]]:
    """A model, and a step of training with clipping and AdamW."""
    config = LlamaConfig(
        dim=dim,
        num_layers=4,
        num_heads=8,
        num_kv_heads=8,
        hidden_dim=4 * dim,
        vocab_size=4096,
        max_seq_len=num_tokens,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = Llama(config).to(device=device, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = batch(model, num_sequences=4)

    def step() -> None:
        optimizer.zero_grad()
        compute_gradients(model, tokens)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return model, step


def time_context(
    name: str,
    model: Llama,
    step: Callable[[], None],
    *,
    synchronize: Callable[[], None],
    clock: Callable[[], float],
) -> float:
    """Milliseconds of a step: of all steps in the context, with the reading at its end."""
    step()
    synchronize()
    started = clock()
    with CONTENDERS[name](model):
        for _ in range(NUM_STEPS):
            step()
    synchronize()
    return (clock() - started) / NUM_STEPS * 1e3


def measure(
    device: str, dim: int, num_tokens: int, num_rounds: int
) -> tuple[int, dict[str, list[float]]]:
    """The number of parameters, and the time of a step of each contender in each round."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    clock = time.perf_counter if device == "cuda" else time.thread_time
    model, step = make_step(device, dim, num_tokens)
    names = list(CONTENDERS)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(num_rounds + 1):
        gc.collect()
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            elapsed_ms = time_context(name, model, step, synchronize=synchronize, clock=clock)
            if number:  # the first round warms up
                times[name].append(elapsed_ms)
    return sum(parameter.numel() for parameter in model.parameters()), times


@click.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--rounds", "num_rounds", default=8, show_default=True)
@click.option("--sizes", "num_sizes", default=3, show_default=True, help="How many models.")
def main(device: str, num_rounds: int, num_sizes: int) -> None:
    """Measure what sampling values adds to a step."""
    torch.set_num_threads(1)
    table = Table(title=f"A training step on {device}, torch {torch.__version__}")
    for column in ("parameters", "tokens", "tracer", "ratio", "quartiles", "step ms"):
        table.add_column(column, justify="right")
    sizes = [(256, 64), (256, 256), (512, 256)]
    if device == "cuda":
        sizes = [(1024, 512), (2048, 1024), (4096, 2048)]
    for dim, num_tokens in sizes[:num_sizes]:
        num_parameters, times = measure(device, dim, num_tokens, num_rounds)
        for name, own in times.items():
            ratios = [ms / untraced for ms, untraced in zip(own, times[UNTRACED], strict=True)]
            low, _, high = statistics.quantiles(ratios, n=4)
            table.add_row(
                f"{num_parameters / 1e6:.1f} M",
                f"4 × {num_tokens}",
                name,
                f"{statistics.median(ratios):.2f}×",
                f"{low:.2f} – {high:.2f}",
                f"{statistics.median(own):.1f}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
