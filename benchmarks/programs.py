"""Run public training programs, unmodified, as ranks of a simulated cluster.

    python benchmarks/programs.py examples=/path/to/pytorch-examples nanogpt=/path/to/nanoGPT \\
        torchtitan=/path/to/torchtitan torchtitan-spring=/path/to/older/torchtitan \\
        megatron=/path/to/Megatron-LM

Each argument names a checkout; programs of checkouts that are not named are left out. Printed for
each program: whether it ran or why not, seconds by the clock and of the processor, the memory of
the largest process, collectives per rank, gaps, and the memory that a rank needs. torchtitan and
Megatron-LM need their own dependencies and the torch that they are written for; torchtitan also a
tokenizer and a data set where its configurations look for them.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


_PARALLELISM = "--parallelism"
_GPT = (
    "pretrain_gpt.py --mock-data --tokenizer-type NullTokenizer --vocab-size 1024 --num-layers 4 "
    "--hidden-size 256 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 1 --global-batch-size 16 --train-iters 5 --lr 1e-4 --eval-iters 0 "
    "--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion --bf16 "
    "--eval-interval 1000 --split 100,0,0 --use-distributed-optimizer --transformer-impl local "
    "--tensor-model-parallel-size 2"
)


def _list_torchtitan(checkout: str, version: str, options: str) -> Iterator[PublicProgram]:
    """The runs of one version; each is a name, a configuration, degrees and what to run."""
    tp, pp, ep, cp = "tensor", "pipeline", "expert", "context"
    runs: list[tuple[str, str, dict[str, int], str, dict[str, Any]]] = [
        ("Llama 3, FSDP", "llama3_debugmodel", {}, "", {}),
        ("Llama 3, FSDP + TP", "llama3_debugmodel", {tp: 2}, "", {}),
        ("Llama 3, compiled", "llama3_debugmodel", {tp: 2}, "--compile.enable", {}),
        ("Llama 3, 1F1B", "llama3_debugmodel", {pp: 2}, "1F1B", {"ranks": "roles"}),
        ("Llama 3, interleaved", "llama3_debugmodel", {pp: 2}, "", {"ranks": "roles"}),
        ("DeepSeek-V3, EP", "deepseek_v3_debugmodel", {ep: 4}, "", {}),
        ("DeepSeek-V3, EP + TP", "deepseek_v3_debugmodel", {ep: 4, tp: 2}, "", {}),
        ("DeepSeek-V3, EP + PP", "deepseek_v3_debugmodel", {ep: 2, pp: 2}, "", {"ranks": "roles"}),
        ("Llama 3 8B", "llama3_8b", {}, "", {}),
        ("Llama 3 70B, rank 1,023", "llama3_70b", {}, "", {"num_nodes": 128, "ranks": "1023"}),
    ]
    if checkout == "torchtitan":
        runs.append(("Llama 3, CP", "llama3_debugmodel", {cp: 2}, "", {}))
        runs.append(("Llama 3, loss parallel", "llama3_debugmodel_ce_loss", {tp: 2}, "", {}))
    else:
        runs.append(("Qwen 3", "qwen3_debugmodel", {}, "", {}))
        runs.append(("Llama 4, EP", "llama4_debugmodel", {ep: 4}, "", {}))
        runs.append(("GPT-OSS, EP", "gpt_oss_debugmodel", {ep: 4}, "", {}))
    for name, config, degrees, more, where in runs:
        command = ["-m", "torchtitan.train", *options.split()]
        module = config.split("_debug")[0] if "debug" in config else "llama3"
        command += ["--module", module, "--config", config]
        for axis, degree in degrees.items():
            command += [f"{_PARALLELISM}.{axis}_parallel_degree", str(degree)]
        if pp in degrees:
            command += [f"{_PARALLELISM}.pipeline_parallel_schedule", more or "Interleaved1F1B"]
            if checkout == "torchtitan":
                command += [f"{_PARALLELISM}.num_pp_microbatches", "4"]
        else:
            command += more.split()
        yield PublicProgram(f"torchtitan {version} {name}", checkout, ".", tuple(command), **where)


_LARGE_TRAINERS = [
    *_list_torchtitan("torchtitan", "(August)", "--training.disable_cuda_graphs"),
    *_list_torchtitan("torchtitan-spring", "(April)", ""),
    PublicProgram("Megatron-LM GPT, TP, distributed optimizer", "megatron", ".", (*_GPT.split(),)),
    PublicProgram(
        "Megatron-LM GPT, TP + PP",
        "megatron",
        ".",
        (*_GPT.split(), "--pipeline-model-parallel-size", "2"),
        ranks="0,4",
    ),
]
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
    *_LARGE_TRAINERS,
]


def main() -> None:
    checkouts = dict(argument.split("=", 1) for argument in sys.argv[1:])
    table = Table(
        "program",
        "result",
        "seconds",
        "processor",
        "memory",
        "collectives",
        "gaps",
        "needs",
        box=None,
    )
    for program in PROGRAMS:
        if program.checkout in checkouts:
            folder = Path(checkouts[program.checkout], program.folder)
            table.add_row(program.name, *_run(program, folder))
    Console(width=160).print(table)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores")


def _run(program: PublicProgram, folder: Path) -> tuple[str, ...]:
    is_module = program.command[0] == "-m"
    before, used, here = time.monotonic(), _processor_seconds(), os.getcwd()
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
    seconds = f"{time.monotonic() - before:.0f}", f"{_processor_seconds() - used:.0f}"
    kilobytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # of all runs so far
    outcome = "ran" if not result.failures else result.failures[0][:120]
    return outcome, *seconds, f"≤ {format_bytes(kilobytes << 10)}", *_describe(result)


def _processor_seconds() -> float:
    """Seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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
