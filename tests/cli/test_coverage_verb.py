"""`shardscope coverage` as a user would type it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from cli.small_target import write
from shardscope.cli import main
from shardscope.record import OpVerdict, load

PLAIN = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU())

def batch(model):
    return torch.randn(4, 16)
"""
SHARDED = (
    PLAIN
    + """
def parallelize(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    return parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
"""
)
STEP = """
def step(model, batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.nn.functional.mse_loss(model(batch), torch.zeros(4, 32)).backward()
    optimizer.step()
"""


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["coverage", *args])


def test_a_table_is_printed_and_the_recording_and_the_csv_are_written(here: Path) -> None:
    result = run(write(here, PLAIN), "-o", "out.json.gz", "--csv", "ops.csv")
    assert result.exit_code == 0, result.output
    assert "Op coverage (exported)" in result.output
    assert "inductor" in result.output
    recording = load(here / "out.json.gz")
    assert [coverage.level for coverage in recording.coverage] == [
        "exported",
        "core_aten",
        "inductor",
    ]
    rows = list(csv.DictReader((here / "ops.csv").read_text().splitlines()))
    assert len(rows) == sum(len(coverage.ops) for coverage in recording.coverage)
    shown = CliRunner().invoke(main, ["show", "out.json.gz"])
    assert "Op coverage (exported)" in shown.output


def test_a_single_level_can_be_tested(here: Path) -> None:
    result = run(write(here, PLAIN), "--level", "core_aten", "--mesh", "dp=2,tp=2")
    assert result.exit_code == 0, result.output
    assert "Op coverage (core_aten)  on dp=2 × tp=2" in result.output
    assert "exported " not in result.output
    assert "saved train.shardscope.json.gz" in result.output


def test_a_sharded_target_is_tested_at_its_placements(here: Path) -> None:
    result = run(write(here, SHARDED), "-o", "out.json", "--level", "exported")
    assert result.exit_code == 0, result.output
    assert "at the model's placements" in result.output
    (level,) = load(here / "out.json").coverage
    (linear,) = [op for op in level.ops if op.op == "aten.linear.default"]
    assert [sharding.inputs for sharding in linear.shardings] == [("weight: Shard(0)",)]
    assert linear.modules == ("0",)


def test_a_step_of_the_targets_own_is_covered_without_its_optimizer(here: Path) -> None:
    result = run(write(here, PLAIN + STEP), "-o", "out.json", "--level", "exported")
    assert result.exit_code == 0, result.output
    recording = load(here / "out.json")
    names = {op.op: op for op in recording.coverage[0].ops}
    assert recording.gaps == ()
    assert names["aten.mse_loss.default"].num_forward == 1
    assert names["aten.mse_loss_backward.default"].num_backward == 1
    assert not any("foreach" in name or "add_" in name for name in names)


def test_a_model_that_reads_values_needs_data(here: Path) -> None:
    text = PLAIN.replace("nn.ReLU()", "Picky()") + (
        "class Picky(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x.relu() if x.sum().item() > -1e9 else x\n"
    )
    refused = run(write(here, text), "--level", "exported")
    assert refused.exit_code == 2
    assert "reads values" in refused.output
    assert "Traceback" not in refused.output
    assert run("train.py", "--level", "exported", "--data").exit_code == 0


def test_a_failing_forward_is_one_sentence_with_one_period(here: Path) -> None:
    text = PLAIN + "\ndef batch(model):\n    return torch.ones(2, 3)\n"
    result = run(write(here, text), "--level", "exported")
    assert result.exit_code == 2
    assert "the model's forward raised RuntimeError" in result.stderr
    assert ".." not in result.stderr


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("nowhere.py",), "does not exist"),
        (("train.py", "--mesh", "tp"), "where NAME=SIZE is expected"),
        (("train.py", "-o", "nowhere/out.json"), "there is no folder"),
        (("train.py", "--level", "fx"), "Invalid value for '--level'"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_two(
    here: Path, args: tuple[str, ...], sentence: str
) -> None:
    write(here, PLAIN)
    result = run(*args)
    assert result.exit_code == 2
    assert sentence in result.output


def test_verdicts_do_not_decide_the_exit_code(here: Path) -> None:
    text = PLAIN.replace("nn.ReLU()", "Total()") + (
        "class Total(nn.Module):\n    def forward(self, x):\n        return x.sum(dim=[])\n"
    )
    result = run(write(here, text), "-o", "out.json", "--level", "exported")
    assert result.exit_code == 0
    verdicts = {op.op: op.verdict for op in load(here / "out.json").coverage[0].ops}
    assert verdicts["aten.sum.dim_IntList"] is OpVerdict.WRONG


def test_no_source_line_of_shardscope_or_click_is_shown(here: Path) -> None:
    (here / "plain.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def model():\n    return nn.Sequential(nn.Linear(16, 16), nn.ReLU())\n\n"
        "def batch(model):\n    return torch.randn(8, 16)\n"
    )
    arguments = ["coverage", "plain.py", "--level", "exported", "-o", "out.json"]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    (found,) = load("out.json").coverage
    assert {source.file for op in found.ops for source in op.sources} == set()


ATTENTION = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 64)

    def forward(self, x):
        x = self.qkv(x).unflatten(-1, (4, 16)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(x, x, x)

def model():
    return Attention().to(torch.bfloat16)

def batch(model):
    return torch.randn(2, 8, 64, dtype=torch.bfloat16)
"""


@pytest.mark.parametrize(
    ("options", "verdict", "kernel"),
    [
        pytest.param(
            (),
            OpVerdict.SHARDED,
            "_scaled_dot_product_cudnn_attention_backward",
            marks=pytest.mark.skipif(
                torch.cuda.is_available(), reason="a GPU has answers of its own"
            ),
        ),
        (
            ("--device", "cpu"),
            OpVerdict.MISSING,
            "_scaled_dot_product_flash_attention_for_cpu_backward",
        ),
    ],
)
def test_attention_is_of_the_device_that_is_simulated(
    here: Path, options: tuple[str, ...], verdict: OpVerdict, kernel: str
) -> None:
    run(write(here, ATTENTION), "--level", "exported", "-o", "out.json", *options)
    recording = load(here / "out.json")
    ops = {op.op: op.verdict for op in recording.coverage[0].ops}
    assert ops[f"aten.{kernel}.default"] is verdict
    assert recording.run.device_type == ("cpu" if options else "cuda")
