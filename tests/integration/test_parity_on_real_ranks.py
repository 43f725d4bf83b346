"""Parity with ranks that are processes: the same verdicts as with ranks that are threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from parity_models import LanguageModel, fail_on_one, make_tokens, tensor_parallel
from shardscope import parity
from shardscope.cli import main
from shardscope.errors import ParityError, RankError
from shardscope.record import FINE, Suspect, load


def test_real_ranks_agree_as_threaded_ranks_do():
    torch.manual_seed(1)
    recording = parity(
        LanguageModel(num_layers=1),
        {"tp": 2},
        parallelize=tensor_parallel,
        inputs=make_tokens(),
        processes=True,
    )
    (found,) = recording.parity
    assert found.is_in_processes
    assert {one.agreement for one in found.tensors} <= FINE
    assert len(found.tensors) == 1 + len(list(LanguageModel(num_layers=1).parameters()))


TARGET = """
import torch
import torch.distributed as dist
from torch import nn

class Part(nn.Module):
    def __init__(self, whole, mesh):
        super().__init__()
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self.weight = nn.Parameter(whole.weight.detach().chunk(self.size, 1)[self.rank].clone())

    def forward(self, x):
        return x.chunk(self.size, -1)[self.rank] @ self.weight.T

def model():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Tanh())

def batch(model):
    return torch.randn(4, 8)

def parallelize(model, mesh):
    model[1] = Part(model[1], mesh)
"""


@pytest.mark.usefixtures("forked_ranks")
def test_a_missing_reduction_of_a_target_is_found_on_real_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TARGET)
    result = CliRunner().invoke(main, ["parity", "train.py", "--processes", "-o", "out.json"])
    assert result.exit_code == 1, result.output
    (found,) = load("out.json").parity[0].divergences
    assert (found.module, found.suspect) == ("1", Suspect.MISSING_REDUCTION)
    assert found.op == "aten.mm.default"


@pytest.mark.usefixtures("forked_ranks")
def test_a_process_that_raises_ends_the_others():
    with pytest.raises(RankError, match="rank 1 failed: ValueError: no weights for this rank"):
        parity(
            torch.nn.Linear(2, 2),
            {"tp": 2},
            parallelize=fail_on_one,
            inputs=torch.ones(2, 2),
            processes=True,
        )


def test_what_cannot_be_sent_to_a_process_is_refused():
    with pytest.raises(ParityError, match="cannot be sent to another process"):
        parity(
            torch.nn.Linear(2, 2),
            {"tp": 2},
            parallelize=lambda model, mesh: None,
            inputs=torch.ones(2, 2),
            processes=True,
        )
