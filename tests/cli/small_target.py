"""A small TARGET for `shardscope trace`, and the means to write and run one."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from shardscope.cli import main

TARGET = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))

def batch(model):
    return torch.randn(4, 16)

def parallelize(model, mesh):
    from torch.distributed.fsdp import fully_shard
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["dp"])
    return model
"""


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["trace", *args])


def write(folder: Path, text: str, name: str = "train.py") -> str:
    (folder / name).write_text(text)
    return name
