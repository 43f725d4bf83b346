"""The pytest plugin, in pytest: its fixture, its settings, and what a failure looks like."""

from __future__ import annotations

import subprocess
import sys
from xml.etree import ElementTree

import pytest

from plugin_loading import LOADED

pytest_plugins = ["pytester"]

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
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A model under FSDP and TP, with tests of it."""
    pytester.makefile(".ini", pytest=SETTING)
    pytester.makepyfile(model=MODEL.format(extra="pass"), test_model=TESTS)
    monkeypatch.syspath_prepend(pytester.path)
    return pytester


def test_a_model_that_keeps_to_its_limits_passes(project: pytest.Pytester) -> None:
    project.runpytest_inprocess(*LOADED, "-W", "error").assert_outcomes(passed=3)


def test_a_collective_more_fails_and_the_report_says_where_it_comes_from(
    project: pytest.Pytester,
) -> None:
    text = MODEL.format(extra="dist.all_reduce(x.detach().clone())")
    project.makepyfile(model=text)
    done = project.runpytest_inprocess(*LOADED, "--junit-xml=junit.xml", "-k", "test_talk")
    done.assert_outcomes(failed=1, deselected=2)
    message = [
        "assert_comm(): 1 of 2 limits broken",
        "all_reduce in layers.*, forward",
        "  expected  exactly 1",
        "  actual    2 on rank 0",
        "  module    layers.0, layers.1",
        "  cause     all_reduce[world], forward, 224 bytes sent in layers.0: "
        "call of torch.distributed.all_reduce",
        "  line      model.py:15 FeedForward.forward  dist.all_reduce(x.detach().clone())",
    ]
    printed = done.stdout.str()
    assert "\n".join(f"E       {line}".rstrip() for line in message[2:]) in printed
    assert ">       assert_comm(" in printed
    assert "plugins/assertions.py" not in printed  # the test's own line, and none of ours
    (failure,) = ElementTree.parse(project.path / "junit.xml").iter("failure")
    for line in message:
        assert line in (failure.get("message") or "")


def test_without_a_mesh_the_fixture_says_how_to_name_one(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(shardscope_world): pass")
    done = pytester.runpytest_inprocess(*LOADED)
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines(["*does not know which world to simulate*pytest.mark.shardscope*"])
    pytester.makefile(".ini", pytest="[pytest]\nshardscope_mesh = dp2\n")
    done = pytester.runpytest_inprocess(*LOADED)
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines(["*shardscope_mesh = dp2 is not understood at 'dp2'*"])


def test_the_marker_and_the_fixture_are_documented(pytester: pytest.Pytester) -> None:
    shown = pytester.runpytest_inprocess(*LOADED, "--markers")
    shown.stdout.fnmatch_lines(["@pytest.mark.shardscope(mesh, rank=0, device='cpu'): *"])
    shown = pytester.runpytest_inprocess(*LOADED, "--fixtures")
    shown.stdout.fnmatch_lines(["shardscope_world*", "*A simulated world of the axes*"])


def test_a_world_is_left_after_a_test_that_fails_in_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        pytestmark = pytest.mark.shardscope({"tp": 2})

        def test_fails(shardscope_world):
            raise KeyError("mine")

        def test_passes(shardscope_world):
            assert shardscope_world.size == 2
        """
    )
    pytester.runpytest_inprocess(*LOADED).assert_outcomes(passed=1, failed=1)


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
