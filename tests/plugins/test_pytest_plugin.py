"""The pytest plugin, in pytest: its fixture, its settings, and what a failure looks like."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nested_pytest import run_pytest

MODEL = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x):
        x = self.down(self.up(x).relu())
        {extra}
        return x * 1

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(FeedForward(), FeedForward())

    def forward(self, x):
        return self.layers(x)

def build(mesh):
    model = Net()
    for block in model.layers:
        plan = {{"up": ColwiseParallel(), "down": RowwiseParallel()}}
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    return model

def step(model):
    model(torch.randn(4, 8)).sum().backward()
"""

TESTS = """
import pytest
from shardscope import trace
from shardscope.testing import assert_comm, assert_contract
from model import build, step

LAYER = {"all_reduce": 1, "max_bytes": "64KiB"}

def test_talk():
    assert_comm(
        step, model=build, mesh={"dp": 2, "tp": 4}, phase="forward",
        per_module={"layers.*": LAYER},
    )

@pytest.mark.shardscope(mesh={"dp": 4, "tp": 2}, rank=3)
def test_in_a_world(shardscope_world):
    assert (shardscope_world.rank, shardscope_world.size) == (3, 8)
    assert_comm(step, model=build, axis="dp", all_gather=2, reduce_scatter=2)

def test_in_the_worlds_of_the_setting(shardscope_world):
    assert shardscope_world.axes == {"dp": 2, "tp": 2}
    with trace(model := build(shardscope_world.mesh)) as t:
        step(model)
    assert_comm(t, axis="tp", phase="forward", all_reduce=2)
"""

SETTING = "[pytest]\nshardscope_mesh = dp=2, tp=2\naddopts = --strict-markers\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model under FSDP and TP, with tests of it, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text(SETTING)
    (tmp_path / "model.py").write_text(MODEL.format(extra="pass"))
    (tmp_path / "test_model.py").write_text(TESTS)
    return tmp_path


def test_a_model_that_keeps_to_its_limits_passes(project: Path) -> None:
    assert run_pytest(project, "-W", "error").outcomes == {"passed": 3}


def test_a_collective_more_fails_and_the_report_says_where_it_comes_from(project: Path) -> None:
    text = MODEL.format(extra="dist.all_reduce(x.detach().clone())")
    (project / "model.py").write_text(text)
    done = run_pytest(project, "--junit-xml=junit.xml", "-k", "test_talk")
    assert done.outcomes == {"failed": 1}
    message = [
        "assert_comm(): 1 of 2 limits broken",
        "all_reduce in layers.*, forward",
        "  expected  exactly 1",
        "  actual    2 on rank 0",
        "  module    layers.0, layers.1",
        "  cause     all_reduce[world], forward, 224 bytes sent in layers.0: "
        "call of torch.distributed.all_reduce",
        "  line      model.py:16 FeedForward.forward  dist.all_reduce(x.detach().clone())",
    ]
    assert "\n".join(f"E       {line}" for line in message[2:]) in done.printed
    assert "shardscope.testing.BreachError: assert_comm()" in done.printed
    assert ">       assert_comm(" in done.printed
    assert "assertions.py" not in done.printed  # the test's own line, and none of ours
    (failure,) = ElementTree.parse(project / "junit.xml").iter("failure")
    for line in message:
        assert line in (failure.get("message") or "")


def test_without_a_mesh_the_fixture_says_how_to_name_one(project: Path) -> None:
    (project / "test_model.py").write_text("def test_it(shardscope_world): pass")
    (project / "pytest.ini").write_text("[pytest]\n")
    done = run_pytest(project)
    assert done.outcomes == {"error": 1}
    assert "does not know which world to simulate. Mark the test with @pytest.mark" in done.printed
    (project / "pytest.ini").write_text("[pytest]\nshardscope_mesh = dp2\n")
    done = run_pytest(project)
    assert done.outcomes == {"error": 1}
    assert "shardscope_mesh = dp2 is not understood at 'dp2'" in done.printed


def test_the_marker_and_the_fixture_are_documented(project: Path) -> None:
    marker = "@pytest.mark.shardscope(mesh, rank=0, device='cpu'): the world that"
    assert marker in run_pytest(project, "--markers").printed
    assert "A simulated world of the axes" in run_pytest(project, "--fixtures").printed


def test_a_world_is_left_after_a_test_that_fails_in_it(project: Path) -> None:
    (project / "test_model.py").write_text(
        "import pytest\n"
        "pytestmark = pytest.mark.shardscope({'tp': 2}, 1)\n"
        "def test_fails(shardscope_world):\n"
        "    raise KeyError('mine')\n"
        "def test_passes(shardscope_world):\n"
        "    assert (shardscope_world.size, shardscope_world.rank) == (2, 1)\n"
    )
    assert run_pytest(project).outcomes == {"passed": 1, "failed": 1}


def test_the_plugin_imports_nothing_heavy_until_it_is_used() -> None:
    program = (
        "import pytest, sys; before = set(sys.modules); import shardscope.plugins.pytest; "
        "print(sorted(m for m in set(sys.modules) - before if not m.startswith('importlib')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == (
        "['shardscope', 'shardscope.plugins', 'shardscope.plugins.pytest']"
    )
