"""Run public training programs, unmodified, as ranks of a simulated cluster.

    python benchmarks/programs.py examples=/path/to/pytorch-examples nanogpt=/path/to/nanoGPT \\
        torchtitan=/path/to/torchtitan

Each argument names a checkout; programs of checkouts that are not named are left out. Printed for
each program: whether it ran or why not, seconds, the memory of the largest process, collectives per
rank, gaps, and the memory that a rank needs. torchtitan needs its own dependencies and the torch
that it is written for.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from shardscope import RunResult, run
from shardscope.record.units import format_bytes


@dataclass(frozen=True)
class PublicProgram:
    """A program in a checkout: its folder, what to run there, and as which ranks."""

    name: str
    checkout: str
    folder: str
    command: tuple[str, ...]  # the script, or -m and a module, and its arguments
    num_nodes: int = 1
    num_per_node: int = 8
    ranks: str = "0"


_TITAN = ("-m", "torchtitan.train", "--training.disable_cuda_graphs")
_LLAMA = ("--module", "llama3", "--config", "llama3_debugmodel")
_DEEPSEEK = ("--module", "deepseek_v3", "--config", "deepseek_v3_debugmodel")
PROGRAMS = [
    PublicProgram("FSDP2 example", "examples", "distributed/FSDP2", ("example.py",)),
    PublicProgram(
        "FSDP2 example, rank 1,023 of 1,024",
        "examples",
        "distributed/FSDP2",
        ("example.py", "--mixed-precision"),
        num_nodes=128,
        ranks="1023",
    ),
    PublicProgram(
        "tensor parallel example",
        "examples",
        "distributed/tensor_parallelism",
        ("tensor_parallel_example.py",),
    ),
    PublicProgram(
        "sequence parallel example",
        "examples",
        "distributed/tensor_parallelism",
        ("sequence_parallel_example.py",),
    ),
    PublicProgram(
        "FSDP + TP example",
        "examples",
        "distributed/tensor_parallelism",
        ("fsdp_tp_example.py",),
        num_nodes=2,
    ),
    PublicProgram(
        "DDP tutorial, torchrun",
        "examples",
        "distributed/ddp-tutorial-series",
        ("multigpu_torchrun.py", "5", "1"),
    ),
    PublicProgram(
        "DDP tutorial, mp.spawn",
        "examples",
        "distributed/ddp-tutorial-series",
        ("multigpu.py", "5", "1"),
    ),
    PublicProgram("DDP example", "examples", "distributed/ddp", ("example.py",)),
    PublicProgram("minGPT-ddp", "examples", "distributed/minGPT-ddp/mingpt", ("main.py",)),
    PublicProgram(
        "imagenet, dummy data",
        "examples",
        "imagenet",
        (
            "main.py",
            "--dummy",
            "--arch",
            "resnet50",
            "--multiprocessing-distributed",
            "--world-size",
            "1",
            "--rank",
            "0",
            "--dist-url",
            "tcp://127.0.0.1:23456",
            "--workers",
            "0",
            "--batch-size",
            "256",
        ),
    ),
    PublicProgram("nanoGPT", "nanogpt", ".", ("train.py", "--compile=False", "--eval_iters=2")),
    PublicProgram("torchtitan Llama 3, FSDP", "torchtitan", ".", (*_TITAN, *_LLAMA)),
    PublicProgram(
        "torchtitan Llama 3, FSDP + TP",
        "torchtitan",
        ".",
        (*_TITAN, *_LLAMA, "--parallelism.tensor_parallel_degree", "2"),
    ),
    PublicProgram(
        "torchtitan Llama 3, pipeline",
        "torchtitan",
        ".",
        (*_TITAN, *_LLAMA, "--parallelism.pipeline_parallel_degree", "2"),
        ranks="roles",
    ),
    PublicProgram(
        "torchtitan DeepSeek-V3, EP",
        "torchtitan",
        ".",
        (*_TITAN, *_DEEPSEEK, "--parallelism.expert_parallel_degree", "2"),
    ),
]


def main() -> None:
    checkouts = dict(argument.split("=", 1) for argument in sys.argv[1:])
    table = Table(
        "program", "result", "seconds", "memory", "collectives", "gaps", "needs", box=None
    )
    for program in PROGRAMS:
        if program.checkout in checkouts:
            folder = Path(checkouts[program.checkout], program.folder)
            table.add_row(program.name, *_run(program, folder))
    Console(width=160).print(table)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores")


def _run(program: PublicProgram, folder: Path) -> tuple[str, ...]:
    is_module = program.command[0] == "-m"
    before, here = time.monotonic(), os.getcwd()
    os.chdir(folder)
    try:
        result = run(
            *program.command[is_module:],
            is_module=is_module,
            num_nodes=program.num_nodes,
            num_per_node=program.num_per_node,
            ranks=program.ranks,
        )
    finally:
        os.chdir(here)
    seconds = f"{time.monotonic() - before:.0f}"
    kilobytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # of all runs so far
    outcome = "ran" if not result.failures else result.failures[0][:120]
    return outcome, seconds, f"≤ {format_bytes(kilobytes << 10)}", *_describe(result)


def _describe(result: RunResult) -> tuple[str, str, str]:
    if not result.has_recording:
        return "", "", ""
    recording = result.recording
    counts = Counter(collective.rank for collective in recording.collectives)
    needed = [profile.needed_bytes for profile in recording.memory if profile.needed_bytes]
    most = str(max(counts.values(), default=0))
    return most, str(len(recording.gaps)), format_bytes(max(needed)) if needed else ""


if __name__ == "__main__":
    main()
