"""Run public training programs, unmodified, as ranks of a simulated cluster.

    python benchmarks/programs.py examples=/path/to/pytorch-examples nanogpt=/path/to/nanoGPT \\
        torchtitan=/path/to/torchtitan torchtitan-spring=/path/to/older/torchtitan \\
        megatron=/path/to/Megatron-LM data=/path/to/data

Each argument names a checkout; programs of checkouts that are not named are left out. Printed for
each program: whether it ran or why not, seconds by the clock and of the processor, the memory of
the largest process, collectives per rank, gaps, and the memory that a rank needs. torchtitan and
Megatron-LM need their own dependencies and the torch that they are written for; torchtitan also a
tokenizer and a data set where its configurations look for them. `data` is a folder of small local
files, for programs that would download theirs: text.txt; img/train and img/val, with a folder of
images for each class; tiny-llama and chat, a model with its tokenizer and a data set as Hugging
Face's libraries save them; tune.yaml, a config of torchtune.
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
    PublicProgram(
        "minGPT-ddp",
        "examples",
        "distributed/minGPT-ddp/mingpt",
        ("main.py", "data_config.path={data}/text.txt"),
    ),
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
            "2",
            "--batch-size",
            "256",
        ),
    ),
    *(
        PublicProgram(name, "examples", folder, command, num_per_node=1)
        for name, folder, command in (
            ("MNIST, one GPU", "mnist", ("main.py",)),
            ("variational autoencoder", "vae", ("main.py",)),
            ("siamese network", "siamese_network", ("main.py",)),
            ("MNIST, Hogwild processes", "mnist_hogwild", ("main.py", "--cuda")),
            ("MNIST, LSTM", "mnist_rnn", ("main.py",)),
            ("forward-forward", "mnist_forward_forward", ("main.py",)),
            ("DCGAN", "dcgan", ("main.py", "--dataset", "fake")),
            ("regression without optimizer", "regression", ("main.py",)),
            ("word language model", "word_language_model", ("main.py", "--accel")),
            ("REINFORCE", "reinforcement_learning", ("reinforce.py",)),
            ("actor-critic", "reinforcement_learning", ("actor_critic.py",)),
        )
    ),
    PublicProgram("nanoGPT, not compiled", "nanogpt", ".", ("train.py", "--compile=False")),
    PublicProgram("nanoGPT, its defaults", "nanogpt", ".", ("train.py",)),
    PublicProgram(
        "llm.c train_gpt2.py, DDP",
        "llm.c",
        ".",
        ("train_gpt2.py", "--model", "d12", "--total_batch_size", "1024"),
        num_per_node=4,
    ),
    PublicProgram(
        "Accelerate FSDP2 example",
        "accelerate",
        "examples/torch_native_parallelism",
        ("fsdp2_fp8.py", "--precision", "bf16", "--sequence-length", "128"),
    ),
    PublicProgram(
        "run_clm.py, Trainer with FSDP2",
        "transformers",
        "examples/pytorch/language-modeling",
        (
            "run_clm.py",
            *("--model_name_or_path", "{data}/tiny-llama", "--train_file", "{data}/text.txt"),
            *("--do_train", "--block_size", "64", "--output_dir", "out", "--bf16"),
            *("--fsdp", "full_shard", "--fsdp_config"),
            '{{"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}',
        ),
    ),
    PublicProgram(
        "TRL SFTTrainer",
        "trl",
        "trl/scripts",
        (
            "sft.py",
            *("--model_name_or_path", "{data}/tiny-llama", "--dataset_name", "{data}/chat"),
            *("--output_dir", "out"),
        ),
    ),
    PublicProgram(
        "timm train.py, AMP",
        "timm",
        ".",
        (
            "train.py",
            *("--data-dir", "{data}/img", "--model", "resnet18", "--num-classes", "10"),
            *("--batch-size", "8", "--img-size", "64", "--workers", "2", "--amp"),
        ),
    ),
    PublicProgram(
        "torchvision reference, classification",
        "vision",
        "references/classification",
        ("train.py", "--data-path", "{data}/img", "--model", "resnet18", "-b", "8", "-j", "2"),
    ),
    PublicProgram(
        "torchtune full_finetune_distributed",
        "torchtune",
        "recipes",
        ("full_finetune_distributed.py", "--config", "{data}/tune.yaml"),
    ),
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
            data = os.path.abspath(checkouts.get("data", "."))
            command = [part.format(data=data) for part in program.command]
            table.add_row(program.name, *_run(program, command, folder))
    Console(width=160).print(table)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores")


def _run(program: PublicProgram, command: list[str], folder: Path) -> tuple[str, ...]:
    is_module = command[0] == "-m"
    before, used, here = time.monotonic(), _processor_seconds(), os.getcwd()
    os.chdir(folder)
    try:
        result = run(
            *command[is_module:],
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
