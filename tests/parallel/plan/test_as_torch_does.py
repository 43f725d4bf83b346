"""The same plan given to PyTorch's parallelize_module lays out the same parameters the same way."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from plan_models import Decoder
from shardscope import simulate
from shardscope.parallel.plan.program_index import index_model
from shardscope.parallel.plan.resolve import resolve
from shardscope.plan.placements import Replicate, read_placement

PLANS: dict[str, dict[str, Any]] = {
    "linear layers": {"layers.*.qkv": ColwiseParallel(), "layers.*.wo": RowwiseParallel()},
    "embedding by rows": {"tok": RowwiseParallel(), "head": ColwiseParallel()},
    "embedding by columns": {"tok": ColwiseParallel(), "head": RowwiseParallel()},
    "norms by sequence": {"layers.*.norm": SequenceParallel(), "layers.0.wo": RowwiseParallel()},
}


def torchs_layout(model: nn.Module, plan: dict[str, Any]) -> dict[str, Any]:
    """How PyTorch lays out the parameters, in our terms; of those that it cuts."""
    with simulate(mesh={"tp": 2}) as world:
        parallelize_module(model, world.mesh, plan)
        placed = {
            name: tuple(read_placement(placement, name) for placement in parameter.placements)
            for name, parameter in model.named_parameters()
            if isinstance(parameter, DTensor)
        }
    return {name: row for name, row in placed.items() if row != (Replicate(),)}


@pytest.mark.parametrize("which", PLANS)
def test_a_plan_means_what_it_means_to_pytorch(which: str) -> None:
    ours = resolve(PLANS[which], index_model(Decoder(is_tied=False)), {"tp": 2})
    torchs = torchs_layout(Decoder(is_tied=False), PLANS[which])
    assert ours.tensors == torchs
    assert torchs
