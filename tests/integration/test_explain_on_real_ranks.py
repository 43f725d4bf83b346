"""Two real ranks, of which one takes another branch: their recordings tell where."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from rank_processes import run_ranks
from shardscope import load
from shardscope.cli import main

TARGET = """\
import torch
import torch.distributed as dist
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x).detach()
        dist.all_reduce(y)
        if dist.get_rank() == 1:
            return y.cos()
        return y.sin()


def model():
    return Net()


def batch(model):
    return torch.ones(2, 4)


def step(model, batch):
    model(batch)
"""


def test_graphs_of_real_ranks_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net.py").write_text(TARGET)
    monkeypatch.chdir(tmp_path)
    command = ["-m", "shardscope", "explain", "net.py", "-o", "run-{rank}.json"]
    for code, printed in run_ranks(2, *command):
        assert code == 0, printed
    files = [str(tmp_path / f"run-{rank}.json") for rank in range(2)]
    for rank, file in enumerate(files):
        (told,) = load(file).explanations
        (collective,) = told.collectives
        assert (told.rank, told.num_graphs) == (rank, 1)
        assert collective.op == "_c10d_functional.all_reduce"
        assert [(span.first, span.count) for span in collective.group] == [(0, 2)]
    shown = CliRunner().invoke(main, ["show", "--strict", *files], catch_exceptions=False)
    assert shown.exit_code == 1
    text = " ".join(shown.output.split())
    assert "compiled-graphs-differ" in text
    assert "Tensor.cos of float32[2, 4] here, Tensor.sin of float32[2, 4] on rank 0" in text
    assert "return y.cos()" in text
