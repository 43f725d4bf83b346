"""A git repository with a model, a contract and two commits: the branch sends twice the bytes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

COMMAND = "trace train.py --mesh tp=4"
TRAIN = """\
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pkg.sizes import BATCH


def model():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def batch(model):
    return torch.randn(BATCH, 64)


def parallelize(model, mesh):
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
"""
CONTRACT = """\
[contract]
gaps = 0

[[contract.comm]]
count = 1
max_bytes = "2KiB"

[ci]
record = ["trace train.py --mesh tp=4"]
"""


def git(*arguments: str, cwd: Path) -> str:
    """Run git without the user's settings."""
    names = ("-c", "user.name=Test", "-c", "user.email=test@example.com")
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    done = subprocess.run(
        ["git", *names, *arguments],
        cwd=cwd,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout.strip()


def make_repository(folder: Path) -> Path:
    """A checkout of the branch `feature`, whose origin has the branch `main`."""
    origin = folder / "origin"
    (origin / "pkg").mkdir(parents=True)
    (origin / "train.py").write_text(TRAIN)
    (origin / "shardscope.toml").write_text(CONTRACT)
    (origin / "pkg" / "__init__.py").touch()
    (origin / "pkg" / "sizes.py").write_text("BATCH = 8\n")
    (origin / "pkg" / "unrelated.py").write_text("x = 1\n")
    git("init", "--quiet", "--initial-branch=main", cwd=origin)
    git("add", ".", cwd=origin)
    git("commit", "--quiet", "--message=base", cwd=origin)
    git("checkout", "--quiet", "-b", "feature", cwd=origin)
    (origin / "pkg" / "sizes.py").write_text("BATCH = 16\n")
    git("commit", "--quiet", "--all", "--message=head", cwd=origin)
    git("clone", "--quiet", "--depth=1", "--branch=feature", origin.as_uri(), "clone", cwd=folder)
    return folder / "clone"
