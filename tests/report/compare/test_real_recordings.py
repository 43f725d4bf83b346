"""Steps that really ran, in a simulated world: what a change of the model or the plan does."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from compared_recordings import lines
from shardscope import Recording, audit, diff, simulate, trace
from shardscope.report.compare.changes import Area
from small_models import MLP, Block, Net, Sum, batch, shard_net

COLWISE_ROWWISE = {"up": ColwiseParallel(), "down": RowwiseParallel()}
ONLY_UP = {"up": ColwiseParallel(output_layouts=Replicate())}


class Twice(Block):
    """A block that adds up once more."""

    def __init__(self) -> None:
        super().__init__()
        self.again = Sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(super().forward(x))


def traced(block: type[nn.Module], *, is_sharded: bool = False) -> Recording:
    """One step of three blocks on rank 0 of 4."""
    with simulate(mesh={"dp": 4}) as world:
        net = Net(3, block)
        if is_sharded:
            shard_net(net, world.mesh)
        with trace(net) as t:
            net(batch()).sum().backward()
    return t.recording


def planned(plan: dict[str, object]) -> tuple[Recording, Recording]:
    """A trace and an audit of an MLP under a plan, on rank 0 of 4."""
    with simulate(mesh={"tp": 4}) as world:
        model = nn.Sequential(MLP(), MLP())
        for block in model:
            parallelize_module(block, world.mesh, plan)
        with trace(model) as t:
            model(batch()).sum().backward()
        return t.recording, audit(model)


def test_an_extra_reduction_in_each_layer_is_found_and_explained():
    before, after = traced(Block), traced(Twice)
    assert not diff(before, traced(Block))
    changes = diff(before, after)
    assert lines(changes, Area.COLLECTIVES) == [
        "added worse | layers.{0…2}.again ×3: all_reduce[dp] in forward: – → 1",
        "added worse | layers.{0…2}.again ×3: all_reduce[dp] in backward: – → 1",
    ]
    assert all("all_reduce" in row.because for row in changes.of(Area.COLLECTIVES))
    assert all("small_models.py:" in row.because for row in changes.of(Area.COLLECTIVES))
    assert lines(changes, Area.PLACEMENTS) == [
        "changed other | layers.{0…2} ×3: class: Block → Twice"
    ]


def test_sharding_a_model_changes_placements_and_collectives():
    changes = diff(traced(Block), traced(Block, is_sharded=True))
    collective_lines = lines(changes, Area.COLLECTIVES)
    assert "added worse | layers.{0…2} ×3: all_gather[dp] in forward: – → 1" in collective_lines
    assert (
        "added worse | layers.{0…2} ×3: reduce_scatter[dp] in backward: – → 1" in collective_lines
    )
    placement_lines = lines(changes, Area.PLACEMENTS)
    where = "layers.{0…2}.linear ×3: weight"
    assert f"changed other | {where}: placement: plain → dp: Shard(0)" in placement_lines
    assert f"changed other | {where}: shape on a rank: 8×8 → 2×8" in placement_lines


def test_another_plan_moves_communication_and_parameters():
    (before, before_held), (after, after_held) = planned(COLWISE_ROWWISE), planned(ONLY_UP)
    assert lines(diff(before, after), Area.COLLECTIVES) == [
        "added worse | {0,1}.up ×2: all_gather[tp] in forward: – → 1",
        "gone better | {0,1}.down ×2: all_reduce[tp] in forward: 1 → –",
    ]
    placement_lines = lines(diff(before_held, after_held), Area.PLACEMENTS)
    assert placement_lines == [
        "gone other | {0,1}.down ×2: tensor parallel: RowwiseParallel over tp → –",
        "changed other | {0,1}.down ×2: weight: placement: tp: Shard(1) → plain",
        "changed other | {0,1}.down ×2: weight: shape on a rank: 8×8 → 8×32",
    ]
