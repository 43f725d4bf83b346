"""Check the hook for torchtitan with a checkout of it, on a rank of a simulated cluster.

    cd /path/to/torchtitan && python /path/to/benchmarks/torchtitan_hook.py

Needs torchtitan's dependencies, the torch that it is written for, and its test data. torchtitan
demands CUDA, which the simulated cluster provides without a GPU. The rank trains three steps with
`--override.imports shardscope.plugins.torchtitan.record_step` and reads what that wrote.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from shardscope import RunResult, load, run

_OVERRIDE = 'shardscope.plugins.torchtitan.record_step={"step": 2, "output": "step.json.gz"}'
_OPTIONS = (
    "--module=llama3 --config=llama3_debugmodel --training.disable_cuda_graphs --training.steps=3 "
    "--metrics.enable_tensorboard"
)
_PREFIX = "hook: "


def train() -> None:
    """Run torchtitan as this rank, and print what the hook recorded."""
    sys.path.insert(0, "")  # the checkout
    from torchtitan.train import main

    sys.argv = ["torchtitan.train", *_OPTIONS.split(), "--override.imports", _OVERRIDE]
    main()
    recording = load("step-0.json.gz")
    kinds = Counter(str(call.kind) for call in recording.collectives)
    owners = sorted({call.owner or "" for call in recording.collectives})
    lines = [
        repr(recording),
        f"{recording.run.num_forwards} forward, {dict(kinds)}, {len(recording.gaps)} gaps",
        f"modules: {', '.join(owners[:6])}, …",
        f"TensorBoard: {[path.name for path in Path('outputs').rglob('*tfevents*')]}",
    ]
    print(*(_PREFIX + line for line in lines), sep="\n", flush=True)


def main() -> None:
    """Run the rank, and print its lines."""
    result: RunResult = run(__file__, "--as-rank", num_per_node=2, steps=100, instruments=["trace"])
    print(result)
    print(*result.failures, sep="\n")


if __name__ == "__main__":
    train() if "--as-rank" in sys.argv else main()
