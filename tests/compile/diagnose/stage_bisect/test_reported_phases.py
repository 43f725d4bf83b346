"""What is announced while a compiler works, and whom the last announcement blames."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd

from plain_judge import capture, judge
from shardscope.compile.diagnose.stage_bisect.attempt import (
    finding_from_last_phase,
    reported_stages,
)
from shardscope.compile.diagnose.subgraph.subgraph import Compiler
from shardscope.record import Phase, Stage

aten = torch.ops.aten


def test_each_step_is_announced_before_it_is_taken_and_left_when_it_is_done() -> None:
    phases: list[str] = []

    def compile_graph(graph: fx.GraphModule, inputs: object) -> object:
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=compile_graph,
        decompositions={aten.relu.default: lambda x: torch.clamp_min(x, 0)},
    )
    subgraph = capture(torch.relu, torch.ones(3, requires_grad=True))
    with reported_stages(phases.append):
        judge(subgraph, Compiler(backend))
    steps = [phase for phase in phases if phase != "outside"]
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
    assert phases[-1] == "outside"


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
def test_the_last_announcement_determines_the_stage(
    announcement: str, stage: Stage, part: str, phase: Phase
) -> None:
    finding = finding_from_last_phase(announcement)
    assert (finding.stage, finding.part, finding.phase) == (stage, part, phase)
