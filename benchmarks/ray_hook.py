"""Check the hook for Ray Train with two real workers on this machine, and time it.

    python benchmarks/ray_hook.py

Starts a local Ray without a dashboard, trains a model with DDP on two workers with and without the
hook, and reads the recordings from the run's storage. Nothing of Ray is left running.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from torch import nn

from shardscope.plugins.ray import collect, observe


def train_loop(config: dict[str, Any]) -> None:
    """Train four steps on this worker, and report the sum of the weights."""
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)))
    optimizer = torch.optim.AdamW(model.parameters())
    if config["is_observed"]:
        observe(model, optimizer, step=3)
    for number in range(4):
        batch = torch.full((4, 64), float(number + ray.train.get_context().get_world_rank()))
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = sum(parameter.double().sum().item() for parameter in model.parameters())
    ray.train.report({"weights": weights}, checkpoint=None)
    if ray.train.get_context().get_world_rank() == 0:
        (Path(config["folder"]) / f"weights-{config['is_observed']}").write_text(repr(weights))


def fit(folder: Path, *, is_observed: bool) -> Any:
    """Run a trainer; the result has the path of its storage."""
    trainer = ray.train.torch.TorchTrainer(
        train_loop,
        train_loop_config={"is_observed": is_observed, "folder": str(folder)},
        scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(name=f"observed-{is_observed}", storage_path=str(folder)),
    )
    begin = time.perf_counter()
    result = trainer.fit()
    print(f"observed: {is_observed}, {time.perf_counter() - begin:.1f} s")
    return result


def main(folder: Path) -> None:
    """Compare a run with and without the hook, and print what was recorded."""
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 << 20,
        logging_level="ERROR",
        log_to_driver=False,
        runtime_env={"env_vars": environment},
    )
    try:
        fit(folder, is_observed=False)
        recording = collect(fit(folder, is_observed=True))
    finally:
        ray.shutdown()
    print(recording)
    for call in recording.collectives:
        print(f"rank {call.rank}: {call.kind} in {call.phase}, {call.input_bytes} B, {call.cause}")
    print("gaps:", [gap.fact for gap in recording.gaps])
    weights = {(folder / f"weights-{flag}").read_text() for flag in (False, True)}
    print("weights are the same to the bit:", len(weights) == 1)


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        main(Path(name))
