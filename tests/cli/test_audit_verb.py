"""`shardscope audit` and `shardscope visualize`, as they are typed."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shardscope import load
from shardscope.cli import main

PROGRAM = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 128, bias=False)
        self.down = nn.Linear(128, 64, bias=False)

    def forward(self, x):
        return x + self.down(self.up(x).relu())

def model():
    return nn.Sequential(Mlp(), Mlp())

def batch(model):
    return torch.randn(4, 64)

plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}

def parallelize(model, mesh, plan=plan):
    parallelize_module(model, mesh["tp"], plan)
    for block in model:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])
"""


@pytest.fixture
def target(here: Path) -> Path:
    path = here / "train.py"
    path.write_text(PROGRAM)
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(
        main, [str(argument) for argument in arguments], catch_exceptions=False
    )


def test_audit_prints_the_tree_and_saves_a_recording(target: Path) -> None:
    result = run("audit", target, "--mesh", "dp=2,tp=4")
    assert result.exit_code == 0, result.output
    assert "0-1[Mlp] ×2 FULLY SHARDED" in result.output
    assert "dp:S(0) tp:S(1)" in result.output
    recording = load(target.parent / "train.shardscope.json.gz")
    assert recording.run.is_simulated
    shown = run("show", "train.shardscope.json.gz").output
    assert shown[shown.index("Sharded modules") :] in result.output


def test_findings_give_exit_code_1(target: Path) -> None:
    target.write_text(PROGRAM + '\nplan = plan | {"*.out": RowwiseParallel()}\n')
    result = run("audit", target, "--mesh", "dp=2,tp=4", "-o", "out.json")
    assert result.exit_code == 1
    assert "warning plan-unused  *.out" in result.output
    assert load("out.json").findings


def test_ties_are_compared_with_the_model_before_it_was_sharded(target: Path) -> None:
    tied = "    m = nn.Sequential(Mlp(), Mlp())\n    m[0].up.weight = m[1].up.weight\n    return m"
    target.write_text(PROGRAM.replace("    return nn.Sequential(Mlp(), Mlp())", tied))
    result = run("audit", target, "--mesh", "dp=2,tp=4")
    assert result.exit_code == 1
    assert "error tied-weights  0.up.weight, 1.up.weight" in result.output


@pytest.mark.parametrize("failure", ["raise KeyError('loss')", "import sys; sys.exit(0)"])
def test_a_failing_step_is_a_gap_and_prints_one_sentence(target: Path, failure: str) -> None:
    target.write_text(f"{PROGRAM}\ndef step(model, batch):\n    {failure}\n")
    result = run("audit", target, "--mesh", "dp=2,tp=4")
    assert result.exit_code == 2
    assert "it ended early" in result.output
    assert "shardscope: train's step() failed" in result.output
    assert load("train.shardscope.json.gz").modules
    without = run("audit", target, "--mesh", "dp=2,tp=4", "--no-step")
    assert (without.exit_code, "Gaps" in without.output) == (0, False)
    assert "No findings (checked by: audit without a step; not run: " in without.output


def test_the_gap_of_a_step_that_reads_values_ends_with_its_remedy(target: Path) -> None:
    target.write_text(f"{PROGRAM}\ndef step(model, batch):\n    model(batch).sum().item()\n")
    run("audit", target, "--mesh", "dp=2,tp=4")
    (gap,) = load("train.shardscope.json.gz").gaps
    assert gap.fact.endswith("or run again with --data.)")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "train.py on. Give one to simulate, such as --mesh dp=8,tp=4"),
        (("--mesh", ""), "--mesh '' has '' where NAME=SIZE is expected"),
        (("--mesh", "dp"), "--mesh 'dp' has 'dp' where NAME=SIZE is expected"),
        (("--mesh", "dp=2,tp=2", "--rank", "4"), "rank"),
    ],
)
def test_bad_input_prints_one_sentence(
    target: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    for verb in (("audit", target), ("visualize", target, "0.up.weight")):
        result = run(*verb, *arguments)
        assert result.exit_code == 2
        assert sentence in result.output
        assert "Traceback" not in result.output


def test_a_plan_that_is_not_a_dict_is_refused_in_one_sentence(target: Path) -> None:
    target.write_text(PROGRAM.split("def parallelize")[0] + "\nplan = 3\n")
    result = run("audit", target, "--mesh", "dp=2")
    assert result.exit_code == 2
    assert "defines plan as int, not as a dict" in result.output


def test_visualize_draws_and_saves(target: Path) -> None:
    result = run("visualize", target, "0.down.weight", "*.up.weight", "--mesh", "dp=2,tp=4")
    assert result.exit_code == 0, result.output
    assert "0.down.weight  64×128 · dp=2: Shard(0), tp=4: Shard(1)" in result.output
    recording = load("train.shardscope.json.gz")
    assert [layout.name for layout in recording.layouts] == [
        "0.down.weight",
        "0.up.weight",
        "1.up.weight",
    ]
    assert recording.modules


def test_visualize_lists_the_parameters_if_none_matches(target: Path) -> None:
    result = run("visualize", target, "0.gate.weight", "--mesh", "dp=2,tp=4")
    assert result.exit_code == 2
    assert "The model has no parameter '0.gate.weight'. Did you mean '0.up.weight'" in (
        result.output
    )
    target.write_text(PROGRAM.partition("def parallelize")[0])
    result = run("visualize", target, "0.up.weight", "--mesh", "dp=2")
    assert result.exit_code == 2
    assert "0.up.weight is not a DTensor: every rank holds all of it" in result.output
