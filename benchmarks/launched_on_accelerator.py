"""Compare `shardscope run` with the same, unmodified program on a GPU: memory and collectives.

    python benchmarks/launched_on_accelerator.py        # needs a GPU

`train_gpt.py` runs twice in each set-up: started by torchrun on the GPU with `shardscope run
--real`, and simulated in a process that sees no GPU. Compared are the peak of the second step as
torch's allocator counts it, the largest amount it has reserved, and all collectives.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from shardscope.record import Recording, load
from shardscope.record.units import format_bytes

PROGRAM = Path(__file__).parent / "train_gpt.py"
SETUPS = [
    "--parallel fsdp",
    "--parallel fsdp --precision bf16",
    "--parallel fsdp --checkpoint --layers 12",
    "--parallel fsdp --accumulate 3 --optimizer SGD",
    "--parallel ddp",
    "--parallel ddp --precision bf16 --accumulate 2",
    "--parallel ddp --precision fp16 --checkpoint",
    "--parallel ddp --dim 2048 --layers 6 --length 2048 --precision bf16",
]


def launch(setup: str, folder: Path, *, is_real: bool) -> tuple[Recording, dict[int, list[int]]]:
    """Run the program in a set-up; its recording, and the peaks it printed for each step."""
    file = folder / f"{'real' if is_real else 'simulated'}.json"
    command = [
        sys.executable, "-m", "shardscope", "run", "--nproc-per-node", "1", "-o", str(file),
        "--force", *(["--real"] if is_real else []), "--", str(PROGRAM), *setup.split(),
    ]  # fmt: skip
    environment = dict(os.environ) if is_real else {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = re.findall(r"PEAK (\d+) (\d+) (\d+)", done.stdout)
    if not file.exists() or not lines:
        sys.exit(f"{setup}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return load(file), {int(step): [int(a), int(r)] for step, a, r in lines}


def list_collectives(recording: Recording) -> list[tuple[object, ...]]:
    """What is compared of each collective."""
    return [
        (collective.kind, collective.owner, collective.phase, collective.input_bytes)
        for collective in recording.collectives
    ]


def main() -> None:
    """Print a row for each set-up."""
    table = Table("set-up", "GPU peak", "peak", "GPU reserved", "reserved", "collectives equal")
    errors = []
    for setup in SETUPS:
        with tempfile.TemporaryDirectory() as folder:
            real, measured = launch(setup, Path(folder), is_real=True)
            simulated, answered = launch(setup, Path(folder), is_real=False)
        profile = simulated.memory[0]
        truth, reserved = measured[1]
        error = profile.peak_bytes / truth - 1
        errors.append(abs(error))
        reserved_text = "not recorded"
        if profile.reserved_bytes is not None:
            change = profile.reserved_bytes / reserved - 1
            reserved_text = f"{format_bytes(profile.reserved_bytes)} ({change:+.2%})"
        pair = list_collectives(real), list_collectives(simulated)
        table.add_row(
            setup,
            format_bytes(truth),
            f"{format_bytes(profile.peak_bytes)} ({error:+.2%})",
            format_bytes(reserved),
            reserved_text,
            f"{pair[0] == pair[1]} ({len(pair[0])}, {len(pair[1])})",
        )
        answer = f"the program was answered {answered[1]}" if 1 in answered else "no answer"
        print(f"{setup}: measured {measured}; {answer}", flush=True)
    Console(width=180).print(table)
    name = torch.cuda.get_device_name()
    print(f"largest error of a peak: {max(errors):.2%} · {name} · torch {torch.__version__}")
    print(f"Python {platform.python_version()}")


if __name__ == "__main__":
    main()
