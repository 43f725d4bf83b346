"""`shardscope types` as a user would type it, and what other verbs make of its recording."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import spmd_types as spmd
import spmd_types.checker
import torch
from click.testing import CliRunner, Result
from torch.distributed.device_mesh import init_device_mesh

from cli.small_target import write
from shardscope import simulate
from shardscope.cli import main

TARGET = """
import spmd_types as spmd
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 16)
        self.down, self.tp = nn.Linear(16, 8, bias=False), None

    def forward(self, x):
        y = self.norm(x)
        if self.tp is not None:
            y = spmd.convert(y, self.tp, src=spmd.I, dst=spmd.R)
        y = self.down(self.up(y).relu())
        if self.tp is not None:
            y = spmd.all_reduce(y, self.tp, src=spmd.P, dst=spmd.I)
        return x + y

def model():
    return nn.Sequential(Block(), Block())

def batch(model):
    return torch.randn(4, 8, requires_grad=True)

def parallelize(model, mesh):
    tp = mesh["tp"]
    for block in model:
        block.tp = tp.get_group()
        for layer, name, dim in (
            (block.up, "weight", 0), (block.up, "bias", 0), (block.down, "weight", 1)
        ):
            shard = getattr(layer, name).detach().chunk(tp.size(), dim)[tp.get_local_rank()]
            setattr(layer, name, nn.Parameter(shard.clone()))
            axes = {tp.get_group(): spmd.S(dim)}
            spmd.assert_type(getattr(layer, name), axes)
    return model
"""


def run(*args: str) -> Result:
    return CliRunner().invoke(main, list(args))


@pytest.fixture
def recorded(here: Path) -> Path:
    target = write(here, TARGET)
    result = run("types", target, "--mesh", "tp=2", "-o", "t.json", "--assertions", "typed.py")
    assert result.exit_code == 0, result.output
    assert "of the types that placements and annotations declare, 6 of 6 (100.0%)" in (
        " ".join(result.output.split())
    )
    assert [line.split() for line in result.output.splitlines() if "*.down ×2" in line] == [
        ["*.down", "×2", "output", "P", "/", "R"]
    ]
    return here


def test_recordings_with_types_are_shown_queried_exported_and_drawn(recorded: Path) -> None:
    assert "*.up ×2" in run("show", "t.json", "--view", "correctness").output
    rows = run("query", "select * from tensor_types where forward = 'P'", "t.json").output
    assert rows.count("output") == 2
    assert run("report", "t.json", "-o", "page.html").exit_code == 0
    figures = json.loads(run("show", "t.json", "--json").output)["figures"]["types"][0]
    assert figures["num_declared"] == figures["num_agreeing"] == 6
    down = next(tensor for tensor in figures["tensors"] if tensor["name"] == "*.down")
    assert down["forward"] == {"tp": "P"}
    assert down["gradient"] == {"tp": "R"}
    assert run("export", "t.json", "--to", "spmd-types", "-o", "again.py").exit_code == 0
    assert Path("again.py").read_text() == Path("typed.py").read_text()


def test_a_contract_holds_types_and_fails_if_one_changes(recorded: Path) -> None:
    assert run("contract", "record", "t.json").exit_code == 0
    text = Path("shardscope.toml").read_text()
    assert '[contract.types]\n"·[0] input" = "tp: R / R"' in text
    assert run("contract", "check", "t.json").exit_code == 0
    line = '"*.down output" = "tp: P / R"'
    assert line in text
    Path("shardscope.toml").write_text(text.replace(line, '"*.down output" = "tp: R"'))
    result = run("contract", "check", "t.json")
    assert result.exit_code == 1
    assert "types of *.down output" in result.output
    assert "expected  tp: R " in result.output
    assert "actual    tp: P / R" in result.output
    Path("shardscope.toml").write_text(text.replace(line, '"gone output" = "tp: R"'))
    assert "no tensor matches 'gone output'" in run("contract", "check", "t.json").output


def test_exported_assertions_hold_under_the_checker_of_spmd_types(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(recorded))
    names: dict[str, object] = {}
    exec(TARGET, names)
    typed: dict[str, object] = {"__name__": "typed"}
    exec(Path("typed.py").read_text(), typed)
    with simulate({"tp": 2}):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for is_wrong in (False, True):
            model = names["parallelize"](names["model"](), mesh)  # type: ignore[operator]
            if is_wrong:
                typed["TYPES"]["*.down", "output", ""] = ({"tp": spmd.R}, ())  # type: ignore[index]
            with spmd.set_current_mesh(mesh), spmd_types.checker.typecheck():
                typed["add_assertions"](model)  # type: ignore[operator]
                if not is_wrong:
                    assert model(torch.randn(4, 8)).shape == (4, 8)
                    continue
                with pytest.raises(spmd.SpmdTypeError, match="expected"):
                    model(torch.randn(4, 8))
    assert "typed" not in sys.modules
