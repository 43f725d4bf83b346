"""`shardscope explain` as a user would type it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from cli.small_target import TARGET, write
from shardscope.cli import main
from shardscope.record import load

BREAKING = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        x = self.layer(x)
        if x.sum() > 1e9:
            x = x * 2
        return x.relu()

def model():
    return nn.Sequential(Block())

def batch(model):
    return torch.randn(4, 8)
"""


def run(*args: str) -> Result:
    torch._dynamo.reset()
    return CliRunner().invoke(main, ["explain", *args])


def test_a_model_of_one_graph_exits_with_0(here: Path) -> None:
    result = run(write(here, TARGET))
    assert result.exit_code == 0, result.output
    assert "1 graph with 3 ops; 0 break sites; 0 recompilations" in result.output


def test_a_graph_break_exits_with_1_and_prints_its_line_and_fix(here: Path) -> None:
    result = run(write(here, BREAKING), "-o", "out.json.gz")
    assert result.exit_code == 1, result.output
    text = " ".join(result.output.split())
    assert "graph-break" in text
    assert "train.py:12" in text
    assert "torch.where(cond, a, b)" in text
    assert "saved out.json.gz" in text
    shown = CliRunner().invoke(main, ["show", "out.json.gz"])
    assert shown.exit_code == 0
    assert "torch.compile summary: train" in shown.output
    (told,) = load("out.json.gz").explanations
    assert (told.num_graphs, told.num_break_events) == (2, 1)
    assert told.guards == ()


def test_two_runs_print_the_same(here: Path) -> None:
    first, second = (run(write(here, BREAKING), "--force").output for _ in range(2))
    assert first == second


def test_guards_and_times_are_printed_if_asked(here: Path) -> None:
    result = run(write(here, TARGET), "--guards", "--times")
    assert "Guards of " in result.output
    assert "tracing" in result.output


def test_a_program_that_compiles_itself_is_explained_with_its_own_backend(here: Path) -> None:
    own = BREAKING.replace(
        "return nn.Sequential(Block())", "return torch.compile(Block(), backend='aot_eager')"
    )
    result = run(write(here, own), "-o", "out.json")
    assert result.exit_code == 1, result.output
    (told,) = load("out.json").explanations
    assert "aot" in [stage.stage for stage in told.stages]


def test_a_backend_can_be_named(here: Path) -> None:
    run(write(here, TARGET), "--backend", "aot_eager", "-o", "out.json")
    (told,) = load("out.json").explanations
    assert "aot" in [stage.stage for stage in told.stages]


def test_a_sharded_model_is_explained_in_a_simulated_world(here: Path) -> None:
    result = run(write(here, TARGET), "--mesh", "dp=2", "-o", "out.json")
    assert "rank 0 of 2 · simulated" in result.output, result.output
    # FSDP's hooks are no part of any graph, and torch's own layers are called by them alone.
    assert load("out.json").explanations[0].num_break_sites >= 1


def test_a_failing_step_is_explained_up_to_the_failure_and_exits_with_2(here: Path) -> None:
    broken = BREAKING + "\ndef step(model, batch):\n    model(batch)\n    raise ValueError('no')\n"
    result = run(write(here, broken))
    assert result.exit_code == 2
    assert "2 graphs" in result.output
    assert "step() failed: ValueError: no" in " ".join(result.output.split())


def test_a_failure_inside_torch_is_not_shown_at_a_line_of_torch(here: Path) -> None:
    wrong = TARGET + "\ndef batch(model):\n    return torch.ones(2, 3)\n"
    result = run(write(here, wrong))
    assert result.exit_code == 2
    assert "step() failed: RuntimeError" in result.stderr
    assert "linear.py" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--backend", "inducer"],
            "torch.compile has no backend 'inducer'. Did you mean 'inductor'",
        ),
        (["--mesh", "dp"], "--mesh 'dp' has 'dp' where NAME=SIZE is expected"),
        (["-o", "missing/out.json"], "missing"),
    ],
)
def test_bad_input_is_one_sentence(here: Path, arguments: list[str], sentence: str) -> None:
    result = run(write(here, TARGET), *arguments)
    assert result.exit_code == 2
    assert sentence in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_a_target_whose_model_is_not_a_module_is_refused(here: Path) -> None:
    result = run(write(here, "def model():\n    return 3\ndef batch(model):\n    return 3\n"))
    assert result.exit_code == 2
    assert "model() returned int, not a torch.nn.Module" in result.output
