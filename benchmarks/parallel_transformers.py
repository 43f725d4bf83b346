"""Models of transformers, partitioned: collectives against Megatron's, numbers against eager mode.

    python benchmarks/parallel_transformers.py                # all models; about five minutes
    python benchmarks/parallel_transformers.py llama bert     # some
    python benchmarks/parallel_transformers.py --mesh tp=8 llama

Every model has two layers and random weights; nothing is downloaded. Each row is one call of
`parallelize`, verified: all outputs, and in training all gradients, are those of eager mode. The
collectives by hand come from the plan's styles and an eager forward pass (`count_by_hand`).
Seconds are those of the process's own clock.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import click
import torch

from shardscope.errors import ShardscopeError
from shardscope.parallel import Plan, parallelize

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from transformers_zoo import MODELS, count_by_hand, loss, make


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice(list(MODELS)))
@click.option("--mesh", "meshes", multiple=True, default=("tp=2", "tp=4"), help="May be repeated.")
def main(names: tuple[str, ...], meshes: tuple[str, ...]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    num_wrong = 0
    print("model        mesh  phase     seconds  collectives")
    for name in names or MODELS:
        for mesh in meshes:
            for is_training in (False, True):
                phase = "training" if is_training else "forward"
                started = time.process_time()
                outcome, is_right = _run(name, mesh, is_training=is_training)
                seconds = time.process_time() - started
                num_wrong += not is_right
                print(f"{name:12} {mesh:5} {phase:8} {seconds:8.1f}  {outcome}", flush=True)
    print(f"torch {torch.__version__}, {num_wrong} rows not as by hand")
    sys.exit(1 if num_wrong else 0)


def _run(name: str, mesh: str, *, is_training: bool) -> tuple[str, bool]:
    """What is printed of one program, and whether it is as by hand."""
    model, inputs = make(name)
    by_hand = count_by_hand(model, inputs)
    try:
        program = parallelize(
            model,
            mesh,
            Plan.from_transformers(model),
            kwargs=inputs,
            loss=loss if is_training else None,
            strict=True,
        )
    except ShardscopeError as error:
        return f"{type(error).__name__}: {error}", False
    found = Counter((str(one.phase), str(one.kind)) for one in program.collectives)
    wanted = Counter({("forward", kind): count for kind, count in by_hand[0].items()})
    if is_training:
        wanted.update({("backward", kind): count for kind, count in by_hand[1].items()})
    text = ", ".join(f"{count} {kind} {phase}" for (phase, kind), count in found.items())
    if found == wanted and not program.not_verified:
        return text, True
    return f"{text}; by hand {dict(wanted)} {program.not_verified}", False


if __name__ == "__main__":
    main()
