"""Recordings of small models that tests of pages and exports share."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import fully_shard

from memory_models import backward, chain
from shardscope import memory, simulate
from shardscope.record import Recording

__all__ = ["make_memory_recording"]


def make_memory_recording(num_layers: int = 6) -> Recording:
    """The memory of linear layers under FSDP2 with AdamW, on rank 0 of 4."""
    with simulate(mesh={"dp": 4}, device="cuda") as world:
        with torch.device("meta"):
            model = chain(num_layers)
        for layer in model:
            fully_shard(layer, mesh=world.mesh)
        fully_shard(model, mesh=world.mesh)
        world.materialize(model)
        optimizer = torch.optim.AdamW(model.parameters())
        return memory(model, backward(model), optimizer).recording
