"""A parallel program as records: causes in words, fallbacks with remedies, and placements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardscope import load, merge, save, show
from shardscope.parallel import Colwise, ModuleOutput, Replicate, Rowwise, Shard
from shardscope.parallel.api import parallelize
from shardscope.parallel.program import ParallelProgram
from shardscope.record import (
    Axis,
    CollectiveKind,
    FallbackKind,
    Inserted,
    Phase,
    PlacedKind,
    expand_ranks,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.down(self.up(self.norm(x)).relu())
        return x + inner


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.sum((0, 1)))
        for layer in self.layers:
            x = layer(x)
        return x


PLAN = {"layers.*.up": Colwise(), "layers.*.down": Rowwise()}


def partition(
    model: nn.Module, *shape: int, plan: Any = PLAN, mesh: str = "tp=2", **options: Any
) -> ParallelProgram:
    torch.manual_seed(0)
    return parallelize(model, mesh, plan, args=(torch.randn(shape),), **options)


def find(program: ParallelProgram, phase: Phase, module: str) -> list[Inserted]:
    return [
        collective
        for collective in program.collectives
        if (collective.phase, collective.module) == (phase, module)
    ]


@pytest.fixture(scope="module")
def trained() -> ParallelProgram:
    inputs = {"x": {"dp": Shard(0)}}
    return partition(
        Model(), 4, 3, 8, mesh="dp=2,tp=2", inputs=inputs, loss=lambda y: y.pow(2).sum()
    )


def test_a_collective_has_kind_module_and_cause() -> None:
    program = partition(Model(), 4, 3, 8, verify=False, plan={"layers.0.up": Colwise(), **PLAN})
    first = find(program, Phase.FORWARD, "layers.0.down") or program.collectives
    assert first[0].source is not None
    assert first[0].source.file.endswith("test_records.py")
    (reduced,) = [
        collective for collective in program.collectives if "layers.1" in collective.module
    ]
    assert reduced.kind is CollectiveKind.ALL_REDUCE
    assert (reduced.axis, reduced.num_ranks, reduced.size_bytes) == ("tp", 2, 4 * 3 * 8 * 4)
    nodes = {node.name: node for node in program.exported(0).graph.nodes}
    assert "all_reduce" in str(nodes[reduced.node].target)


@pytest.mark.parametrize(
    ("plan", "cause"),
    [
        ({"up": Colwise(), "down": Rowwise()}, "the plan's output of down"),
        ({"up": Colwise(), "down": Rowwise(output=Shard(0))}, "the plan's output of down"),
        ({"up.weight": Shard(1)}, "aten.linear's add needs both replicated"),
        ({"up": Colwise(), "down": Rowwise(input=Replicate())}, "the plan's input of down"),
        ({"": ModuleOutput(Shard(0)), "up": Colwise()}, "aten.linear needs all replicated"),
    ],
)
def test_causes_are_the_plans_or_the_ops(plan: dict[str, Any], cause: str) -> None:
    program = partition(Block(), 4, 8, plan=plan, verify=False)
    causes = [collective.cause for collective in program.collectives]
    assert any(cause in text for text in causes), causes


def test_causes_of_gradients_name_the_value_and_its_users(trained: ParallelProgram) -> None:
    causes = {
        (collective.axis, collective.cause)
        for collective in trained.collectives
        if collective.phase is Phase.BACKWARD
    }
    assert ("tp", "gradient of the output of layers.1.norm, which layers.1.up uses sharded") in (
        causes
    )
    assert ("dp", "gradient of layers.0.norm.weight, which layers.0.norm uses sharded") in causes
    weights = [
        collective for collective in trained.collectives if "layers.0.up.weight" in collective.cause
    ]
    assert [(collective.axis, collective.size_bytes) for collective in weights] == [
        ("dp", 8 * 8 * 4)
    ]


def test_every_value_has_its_placements(trained: ParallelProgram) -> None:
    placements = trained.placements
    names = {node.name for node in trained.exported(0).graph.nodes}
    assert set(placements) <= names
    assert placements["x"] == ("S(0)", "R")
    names = {role.name: value.name for value, role in trained.graph.inputs}
    assert placements[names["layers.0.up.weight"]] == ("R", "S(0)")
    assert {"P"} <= {placement for row in placements.values() for placement in row}


class Sorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).sort(-1).values


def test_a_fallback_has_its_input_placements_and_a_remedy() -> None:
    program = partition(Sorted(), 4, 8, plan={"up": Colwise()}, verify=False)
    (fallback,) = program.recording().parallel[0].fallbacks
    assert (fallback.kind, fallback.axis, fallback.placements) == (
        FallbackKind.REPLICATE,
        "tp",
        ("S(1)",),
    )
    assert fallback.op.startswith("aten.sort")
    assert fallback.size_bytes == 4 * 16 * 4
    assert fallback.source is not None
    assert fallback.source.text == "return self.up(x).sort(-1).values"
    assert "aten.sort gets replicated inputs along tp" in fallback.remedy


def test_placements_name_the_rule_that_decided(trained: ParallelProgram) -> None:
    placed = {tensor.name: tensor for tensor in trained.recording().parallel[0].placed}
    weight = placed["layers.1.down.weight"]
    assert (weight.kind, weight.placements) == (PlacedKind.PARAMETER, ("R", "S(1)"))
    assert (weight.shape, weight.local_shape, weight.local_bytes) == ((8, 16), (8, 8), 256)
    assert weight.rules == ("layers.*.down",)
    assert placed["layers.0.norm.weight"].rules == ()
    assert (placed["x"].kind, placed["x"].rules) == (PlacedKind.INPUT, ("inputs",))
    kinds = {tensor.kind for tensor in placed.values()}
    assert {PlacedKind.OUTPUT, PlacedKind.MUTATION} <= kinds


def test_a_recording_survives_saving_and_merging(trained: ParallelProgram, tmp_path: Path) -> None:
    recording = trained.recording()
    assert load(save(recording, tmp_path / "made.json")) == recording
    assert merge([recording]).parallel == recording.parallel
    assert recording.run.instruments == ("parallelize",)
    assert recording.run.axes == (Axis(name="dp", size=2), Axis(name="tp", size=2))
    assert sorted(expand_ranks(recording.run.ranks)) == [0, 1, 2, 3]


def test_a_recording_has_the_verdicts_or_the_reason_for_none(trained: ParallelProgram) -> None:
    proved = trained.recording().parallel[0]
    assert len(proved.verdicts) == 1 + 1 + 12  # the loss, the buffer, the gradients
    assert proved.unverified == ""
    assert proved.program == "Model"
    unproved = (
        partition(Block(), 4, 8, plan={"up": Colwise()}, verify=False).recording().parallel[0]
    )
    assert (unproved.verdicts, unproved.unverified) == (
        (),
        ("verification was turned off (verify=False)"),
    )


def test_the_repr_of_a_program_is_one_line(trained: ParallelProgram) -> None:
    assert repr(trained).startswith("<ParallelProgram Model on dp=2, tp=2: ")
    assert "all_reduce" in repr(trained)
    assert repr(trained).endswith(", 0 fallbacks, verified>")


def test_show_prints_a_program(
    trained: ParallelProgram, capsys: pytest.CaptureFixture[str]
) -> None:
    show(trained)
    assert "Parallel program  Model on dp=2 × tp=2, for training" in capsys.readouterr().out
