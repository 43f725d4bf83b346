"""An audit reads the annotations that spmd_types attaches to plain parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import spmd_types as spmd
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from older_torch import TORCH
from shardscope import Recording, World, audit, show, simulate
from shardscope.record import Axis, Parameter
from spmd_models import TypedBlock


@pytest.fixture
def world() -> Iterator[World]:
    with simulate({"dp": 2, "tp": 4}) as world:
        yield world


def typed_block(world: World) -> nn.Module:
    return TypedBlock(world.mesh.get_group("tp"), world.mesh.get_group("dp"))


@pytest.fixture
def audited(world: World) -> Recording:
    return audit(typed_block(world))


def parameters(recording: Recording) -> dict[str, Parameter]:
    return {
        f"{module.name}.{parameter.name}".lstrip("."): parameter
        for module in recording.modules
        for parameter in module.parameters
    }


def test_annotated_parameter_has_its_global_shape_and_a_placement_per_axis(
    audited: Recording,
) -> None:
    placed = {
        name: (record.shape, record.local_shape, record.axes, record.placements)
        for name, record in parameters(audited).items()
        if record.is_annotated
    }
    axes = ("dp", "tp")
    assert placed == {
        "up": ((4096, 4096), (4096, 1024), axes, ("Replicate", "Shard(1)")),
        "down": ((4096, 4096), (1024, 4096), axes, ("Replicate", "Shard(0)")),
        "gain": ((4096,), (4096,), axes, ("Replicate", "Invariant")),
        "spare": ((4096, 4096), (4096, 4096), axes, ("Replicate", "Invariant")),
        "seed": ((3,), (3,), axes, ("Replicate", "Varying")),
    }
    up = parameters(audited)["up"]
    assert (up.global_bytes, up.local_bytes) == (64 << 20, 16 << 20)


def test_only_the_large_parameter_annotated_as_the_same_on_every_rank_is_a_finding(
    audited: Recording,
) -> None:
    (finding,) = audited.findings
    assert (finding.rule, finding.subject) == ("replicated", "spare")
    assert finding.fact == ("64.0 MiB are the same on 4 ranks of tp, which shards other parameters")


def test_what_the_annotations_leave_open_is_a_gap(audited: Recording) -> None:
    assert [(gap.place, gap.fact) for gap in audited.gaps] == [
        (
            "free",
            "this parameter has no spmd_types annotation: whether it is sharded or replicated is "
            "not known",
        ),
        (
            "seed",
            "its type on tp is V (varying), which does not name a sharded dim: its shape is that "
            "of this rank",
        ),
    ]


def test_axes_that_shard_the_same_dim_are_in_the_order_of_the_partition_spec(world: World) -> None:
    tp, dp = world.mesh.get_group("tp"), world.mesh.get_group("dp")
    model = nn.Linear(4, 4, bias=False)
    spec = spmd.PartitionSpec((tp, dp), None)
    spmd.assert_type(model.weight, {dp: spmd.V, tp: spmd.V}, partition_spec=spec)
    record = parameters(audit(model))["weight"]
    assert (record.axes, record.placements) == (("tp", "dp"), ("Shard(0)", "Shard(0)"))
    assert (record.shape, record.local_shape) == ((32, 4), (4, 4))


def test_plan_is_compared_with_the_annotations(world: World) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 2, bias=False)
            self.down = nn.Linear(8, 2, bias=False)

    model = Layer()
    for linear in (model.up, model.down):
        spmd.assert_type(linear.weight, {world.mesh.get_group("tp"): spmd.S(0)})
    recording = audit(model, plan={"up": ColwiseParallel(), "down": RowwiseParallel()})
    assert [(finding.rule, finding.subject) for finding in recording.findings] == [
        ("plan-not-applied", "down.weight")
    ]


def test_table_and_page_show_the_annotations(
    audited: Recording, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    show(audited)
    text = capsys.readouterr().out
    assert "dp:R tp:S(1)" in text
    assert "dp:R tp:I" in text
    assert "I: invariant, V: varying" in text
    assert "dp: Replicate, tp: Shard(1) (annotated with spmd_types)" in audited.html()


@pytest.mark.skipif(TORCH < (2, 14), reason="FSDP2 of torch 2.13 does not keep annotations")
def test_annotations_of_parameters_under_fsdp_are_read_from_its_groups(world: World) -> None:
    tp, dp = world.mesh.get_group("tp"), world.mesh.get_group("dp")
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    spmd.assert_type(model[0].weight, {dp: spmd.R, tp: spmd.S(0)})
    spmd.assert_type(model[0].bias, {dp: spmd.R, tp: spmd.S(0)})
    for parameter in model[1].parameters():
        spmd.assert_type(parameter, {dp: spmd.R, tp: spmd.I})
    dims = fsdp.DataParallelMeshDims(shard="dp")  # type: ignore[attr-defined]
    fsdp.fully_shard(model, mesh=world.mesh, dp_mesh_dims=dims)  # type: ignore[call-arg]
    records = parameters(audit(model))
    assert all(record.is_annotated for record in records.values())
    assert (records["0.weight"].shape, records["0.weight"].local_shape) == ((32, 8), (4, 8))
    assert records["1.weight"].placements == ("Shard(0)", "Invariant")


def test_axes_of_a_model_without_a_mesh_are_those_of_its_annotations() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        model = nn.Linear(8, 8, bias=False)
        group = dist.new_group([0, 1], group_desc="pair")
        spmd.assert_type(model.weight, {group: spmd.S(0)})
        recording = audit(model)
    finally:
        dist.destroy_process_group()
    assert recording.run.axes == (Axis(name="pair", size=2),)
    assert parameters(recording)["weight"].shape == (16, 8)


def test_model_without_annotations_has_no_gap_about_them(world: World) -> None:
    recording = audit(nn.Linear(4, 4))
    assert recording.gaps == ()
    assert not any(record.is_annotated for record in parameters(recording).values())
