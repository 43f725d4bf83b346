"""The decoder as stages of torch's pipeline schedules; right, unless a case changes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from benchmarks.silent.decoder import Decoder
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage


class Stage(nn.Module):
    """Consecutive layers of the decoder; the first stage has the embeddings, the last the head."""

    def __init__(self, model: Decoder, keys: list[str], *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.tok_embeddings = model.tok_embeddings if is_first else None
        self.layers = nn.ModuleDict({key: model.layers[key] for key in keys})
        self.norm, self.output = (model.norm, model.output) if is_last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])
        mask = positions[:, None] >= positions[None, :]
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x, positions, mask)
        return x if self.norm is None or self.output is None else self.output(self.norm(x))


class Stages(nn.Module):
    """The stages of a rank, as one module, and the schedule that runs them."""

    def __init__(self, parts: dict[int, Stage], num_stages: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts.values())
        self.indices, self.num_stages = list(parts), num_stages
        self.schedule: Any = None

    def start(self, mesh: DeviceMesh, make: Callable[[Any], Any]) -> None:
        """Make the schedule of the stages before the first step."""
        if self.schedule is not None:
            return
        group = mesh.get_group("pp")
        stages = [
            PipelineStage(part, index, self.num_stages, torch.device("cpu"), group=group)
            for part, index in zip(self.parts, self.indices, strict=True)
        ]
        self.schedule = make(stages if len(stages) > 1 else stages[0])

    def step(self, inputs: Tensor, target: Tensor) -> list[Tensor]:
        """Run forward and backward of all micro-batches; their losses, on the last stage."""
        losses: list[Tensor] = []
        is_last = self.num_stages - 1 in self.indices
        options = {"target": target, "losses": losses} if is_last else {}
        self.schedule.step(*([inputs] if 0 in self.indices else []), **options)
        return [loss.detach() for loss in losses]


def build_stages(model: Decoder, mesh: DeviceMesh, *, num_per_rank: int = 1) -> Stages:
    """The stages of this rank; several are distributed over the ranks in a loop."""
    size, rank = mesh["pp"].size(), mesh.get_local_rank("pp")
    keys, number = list(model.layers), size * num_per_rank
    length = len(keys) // number
    indices = [rank + size * part for part in range(num_per_rank)]
    parts = {
        index: Stage(
            model,
            keys[index * length : (index + 1) * length],
            is_first=index == 0,
            is_last=index == number - 1,
        )
        for index in indices
    }
    return Stages(parts, number)
