"""What is announced while a compiler works, and whom the last announcement blames."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd

from plain_judge import capture, judge
from shardscope.compile.diagnose.blaming.announcements import announced, blame_last
from shardscope.compile.diagnose.compiler import Compiler
from shardscope.record import Phase, Stage

aten = torch.ops.aten


def test_each_step_is_announced_before_it_is_taken_and_left_when_it_is_done() -> None:
    said: list[str] = []

    def compile_graph(graph: fx.GraphModule, inputs: object) -> object:
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=compile_graph,
        decompositions={aten.relu.default: lambda x: torch.clamp_min(x, 0)},
    )
    fragment = capture(torch.relu, torch.ones(3, requires_grad=True))
    with announced(said.append):
        judge(fragment, Compiler(backend))
    steps = [one for one in said if one != "outside"]
    assert steps == [
        "tracing",
        "tracing",
        "tracing: decomposition of aten.relu",
        "partitioning",
        "compiling forward",
        "running forward",
        "compiling backward",
        "running backward",
    ]
    assert said[-1] == "outside"


@pytest.mark.parametrize(
    ("announcement", "stage", "part", "phase"),
    [
        ("tracing", Stage.AOT, "", Phase.FORWARD),
        (
            "tracing: decomposition of aten.relu",
            Stage.DECOMPOSITION,
            "decomposition of aten.relu",
            Phase.FORWARD,
        ),
        ("partitioning", Stage.PARTITION, "", Phase.FORWARD),
        (
            "compiling backward: lowering of aten.exp.default",
            Stage.BACKEND,
            "lowering of aten.exp.default",
            Phase.BACKWARD,
        ),
        ("running forward", Stage.BACKEND, "", Phase.FORWARD),
        ("outside", Stage.BACKEND, "", Phase.FORWARD),
        ("what another part of the program says", Stage.BACKEND, "", Phase.FORWARD),
    ],
)
def test_the_last_announcement_tells_whom_to_blame(
    announcement: str, stage: Stage, part: str, phase: Phase
) -> None:
    found = blame_last(announcement)
    assert (found.stage, found.part, found.phase) == (stage, part, phase)
