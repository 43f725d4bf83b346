"""`shardscope parallelize` as a user would type it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from cli.small_target import write
from shardscope.cli import main
from shardscope.parallel.runtime.rank_programs import RankPrograms
from shardscope.record import Phase, load

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())

def model():
    return Model()

def batch(model):
    return torch.randn(4, 8)
"""
TARGET = (
    MODEL
    + """
plan = {"up": "colwise", "down": "rowwise"}
"""
)
SORTED = TARGET.replace("self.up(x).relu()", "self.up(x).sort(-1).values")


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["parallelize", *args])


def test_a_report_is_printed_and_the_recording_written(here: Path) -> None:
    result = run(write(here, TARGET), "--mesh", "tp=2", "-o", "made.json")
    assert result.exit_code == 0, result.output
    assert "Parallel program  Model on tp=2, forward only" in result.output
    assert "the plan's output of down" in result.output
    assert "The only tensor agrees (1 output)." in result.output
    (found,) = load(here / "made.json").parallel
    assert [str(collective.kind) for collective in found.inserted] == ["all_reduce"]
    shown = CliRunner().invoke(main, ["show", "made.json"])
    assert "the plan's output of down" in shown.output


def test_training_adds_the_backward_pass_and_batch_axes_shard_the_batch(here: Path) -> None:
    target = write(here, TARGET)
    mesh = ("--mesh", "dp=2,tp=2", "--batch-axis", "dp")
    result = run(target, *mesh, "--training", "-o", "made.json")
    assert result.exit_code == 0, result.output
    (found,) = load(here / "made.json").parallel
    assert found.is_training
    assert {
        collective.axis for collective in found.inserted if collective.phase is Phase.BACKWARD
    } == {"dp"}
    (x,) = [placed for placed in found.placed if placed.name == "x"]
    assert x.placements == ("S(0)", "R")


def test_a_loss_of_the_targets_own_is_differentiated(here: Path) -> None:
    loss = "\ndef loss(output):\n    return output.pow(2).mean()\n"
    result = run(write(here, TARGET + loss), "--training", "-o", "made.json")
    assert result.exit_code == 0, result.output
    (found,) = load(here / "made.json").parallel
    assert "aten.mean.default" not in result.output
    assert len(found.verdicts) == 1 + 4


def test_a_plan_may_come_from_a_file(here: Path) -> None:
    (here / "plan.toml").write_text('[plan]\nup = "colwise"\ndown = "rowwise"\n')
    result = run(write(here, MODEL), "--plan", "plan.toml")
    assert result.exit_code == 0, result.output
    assert "1 collective per rank" in result.output


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11 of itself
def test_programs_of_all_ranks_are_saved_and_load(here: Path) -> None:
    result = run(write(here, TARGET), "--save-dir", "out/programs")
    assert result.exit_code == 0, result.output
    assert result.output.endswith("saved out/programs/rank-0.pt2\nsaved out/programs/rank-1.pt2\n")
    loaded = [torch.export.load(here / f"out/programs/rank-{rank}.pt2") for rank in (0, 1)]
    assert [tuple(program.state_dict["up.weight"].shape) for program in loaded] == [(8, 8), (8, 8)]
    again = run("train.py", "--save-dir", "out/programs")
    assert again.exit_code == 2
    assert "out/programs/rank-0.pt2" in again.output
    assert run("train.py", "--save-dir", "out/programs", "--force").exit_code == 0


def test_without_verification_no_data_is_needed(here: Path) -> None:
    large = TARGET.replace("16", "1_000_000_000")
    result = run(write(here, large), "--no-verify", "--mesh", "tp=8")
    assert result.exit_code == 0, result.output
    assert "Not verified: verification was turned off" in " ".join(result.output.split())
    assert "3.73 GiB" in result.output


def test_strict_exits_with_1_after_listing_the_fallbacks(here: Path) -> None:
    target = write(here, SORTED)
    assert run(target).exit_code == 0
    result = run(target, "--strict", "--save-dir", "out")
    assert result.exit_code == 1
    assert "replicate aten.sort" in result.output
    assert "--strict: 1 fallback, listed above." in result.output
    assert list((here / "out").iterdir()) == []


def test_a_program_that_is_wrong_is_a_finding_and_is_not_saved(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def corrupt(self: RankPrograms, rank: int) -> object:
        made = make_forward(self, rank)
        (linear, *_) = made.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
        linear.target = torch.ops.aten.sigmoid.default
        return made

    make_forward = RankPrograms.forward
    monkeypatch.setattr(RankPrograms, "forward", corrupt)
    result = run(write(here, TARGET), "-o", "made.json", "--save-dir", "out")
    assert result.exit_code == 1, result.output
    assert "1 of 1 tensor differ" in result.output
    assert "does not compute what the original does" in result.output
    assert [finding.rule for finding in load(here / "made.json").findings] == ["parallel-differs"]
    assert list((here / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        (MODEL, (), "train defines no plan, so it is unknown what to shard"),
        (TARGET, ("--plan", "none.toml"), "The plan 'none.toml' cannot be read"),
        (TARGET, ("--mesh", "tp"), "--mesh 'tp' has 'tp' where NAME=SIZE is expected"),
        (TARGET, ("--batch-axis", "dq"), "dq"),
        (TARGET, ("-o", "no/such/folder.json"), "no/such"),
        (TARGET.replace('"up"', '"upp"'), (), "upp"),
        (TARGET.replace("return Model()", "return 3"), (), "model() returned int"),
        (TARGET.replace("torch.randn(4, 8)", "1 / 0"), (), "batch() failed: ZeroDivisionError"),
        (TARGET.replace("x).relu()", "x[: int(x.sum())])"), (), "torch.export cannot trace Model"),
        (TARGET + "def loss(output):\n    return output.nope\n", ("--training",), "loss() failed"),
    ],
)
def test_bad_input_is_one_sentence(
    here: Path, text: str, options: tuple[str, ...], sentence: str
) -> None:
    result = run(write(here, text), *options)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    said = [line for line in result.output.splitlines() if line.startswith("shardscope: ")]
    assert len(said) == 1
    assert sentence in said[0]
    assert "unexpected" not in said[0]
