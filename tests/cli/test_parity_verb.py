"""`shardscope parity` as a user would type it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from click.testing import CliRunner, Result

from cli.small_target import write
from shardscope.cli import main
from shardscope.record import Agreement, Suspect, load

TARGET = """
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())

def model():
    return nn.Sequential(*(Block() for _ in range(3)))

def batch(model):
    return torch.randn(4, 8)

def parallelize(model, mesh):
    for block in model:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    return model
"""
DOUBLED = TARGET.replace(
    "    return model\n",
    "    model[1].down.register_forward_hook(lambda _, __, y: y * mesh.size())\n    return model\n",
)
STEP = """
def step(model, batch):
    torch.nn.functional.mse_loss(model(batch), batch).backward()
"""


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["parity", *args])


def test_a_model_that_agrees_exits_with_0_and_its_recording_can_be_shown(here: Path) -> None:
    result = run(write(here, TARGET), "--mesh", "tp=4", "-o", "out.json.gz")
    assert result.exit_code == 0, result.output
    assert "All 13 tensors agree" in result.output
    assert "*.up.weight ×3" in result.output
    assert "saved out.json.gz" in result.output
    assert "tp=4 · all 4 ranks · simulated" in result.output
    recording = load(here / "out.json.gz")
    assert recording.run.command.startswith("shardscope")
    shown = CliRunner().invoke(main, ["show", "out.json.gz"])
    assert "All 13 tensors agree" in shown.output
    assert not dist.is_initialized()


def test_a_model_that_differs_exits_with_1_and_prints_location_and_cause(here: Path) -> None:
    result = run(write(here, DOUBLED), "-o", "out.json")
    assert result.exit_code == 1, result.output
    assert "parity-double-reduction  1.down" in result.output
    assert "13 of 13 tensors differ" in result.output
    (parity,) = load(here / "out.json").parity
    assert parity.divergences[0].suspect is Suspect.DOUBLE_REDUCTION
    assert parity.divergences[0].module == "1.down"


@pytest.mark.parametrize(
    ("change", "code", "summary"),
    [
        ("", 0, "All 13 tensors agree (outputs, gradients and changed buffers), "),
        (
            "    model[1].register_forward_hook(lambda _, __, y: 2 * y)\n",
            1,
            "13 of 13 tensors differ",
        ),
        (
            "    model.register_forward_hook(lambda _, __, y: y.flatten())\n",
            1,
            "1 of 13 tensors differ",
        ),
    ],
)
def test_summary_findings_and_exit_code_agree_in_mixed_precision(
    here: Path, change: str, code: int, summary: str
) -> None:
    text = TARGET.partition("def parallelize")[0] + (
        "def parallelize(model, mesh):\n"
        "    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard\n"
        "    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)\n"
        f"    fully_shard(model, mesh=mesh['dp'], mp_policy=policy)\n{change}"
    )
    result = run(write(here, text), "--mesh", "dp=2", "--strict", "-o", "out.json")
    assert result.exit_code == code, result.output
    assert summary in " ".join(result.output.split())
    severities = {finding.severity for finding in load(here / "out.json").findings}
    assert ("error" in severities) is bool(code)
    assert ("reshaped" in result.output) is ("flatten" in change)


def test_a_step_of_its_own_is_run(here: Path) -> None:
    result = run(write(here, TARGET + STEP), "-o", "out.json")
    assert result.exit_code == 0, result.output
    (parity,) = load(here / "out.json").parity
    assert {tensor.agreement for tensor in parity.tensors} <= {Agreement.EQUAL, Agreement.CLOSE}


def test_each_rank_may_have_its_share_of_the_batch(here: Path) -> None:
    text = TARGET.partition("def parallelize")[0] + (
        "def parallelize(model, mesh):\n"
        "    from torch.distributed.fsdp import fully_shard\n"
        "    return fully_shard(model, mesh=mesh['dp'])\n"
    )
    result = run(write(here, text), "--mesh", "dp=2", "--batch-axis", "dp")
    assert result.exit_code == 0, result.output
    refused = run(write(here, text), "--mesh", "dp=2", "--batch-axis", "pp")
    assert refused.exit_code == 2
    assert "the mesh has the axes dp" in refused.output


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (TARGET.partition("def parallelize")[0], "defines neither parallelize(model, mesh) nor"),
        (TARGET.partition("def batch")[0], "defines no function batch()"),
        (TARGET.replace("nn.Sequential(*(Block() for _ in range(3)))", "3"), "returned int, not a"),
        (TARGET.replace("nn.Linear(16, 8)", "nn.Linear(16, 8, device='meta')"), "on the meta"),
        (
            TARGET.replace("plan = {", "1 / 0\n        plan = {"),
            "model failed on rank 0: ZeroDivisionError: division by zero (",
        ),
        (TARGET.replace("torch.randn(4, 8)", "1 / 0"), "batch() failed: ZeroDivisionError"),
        (
            TARGET.replace("self.up(x)", "self.up(x.T)"),
            "model failed on a single device: RuntimeError: ",
        ),
    ],
)
def test_bad_targets_exit_with_2_and_one_sentence(here: Path, text: str, sentence: str) -> None:
    result = run(write(here, text))
    assert result.exit_code == 2, result.output
    assert sentence in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--mesh", "tp"), "where NAME=SIZE is expected"),
        (("--mesh", "tp=1000"), "Choose at most 256"),
        (("--precision", "int8"), "is not one of"),
        (("-o", "no/such/folder.json"), "no/such"),
    ],
)
def test_bad_options_exit_with_2(here: Path, args: tuple[str, ...], sentence: str) -> None:
    result = run(write(here, TARGET), *args)
    assert result.exit_code == 2, result.output
    assert sentence in result.output
