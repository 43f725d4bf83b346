"""Data parallelism as properties: each read of a parameter gathers it, and backward reduces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement


class ScaleGradient(torch.autograd.Function):
    """The input in forward, a multiple of the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


def shard_parameters(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    gradient_placements: Sequence[Placement],
    gradient_scale: float = 1.0,
) -> None:
    """Make the module's own parameters DTensors, which its code reads as full plain tensors.

    `gradient_placements` are those of the gradient of the full tensor, before it is reduced.
    """
    names = [name for name, _ in module.named_parameters(recurse=False)]

    def make_property(name: str) -> property:
        def read(self: nn.Module) -> Tensor:
            parameter = self._parameters[name]
            assert isinstance(parameter, DTensor)
            full = parameter.redistribute(placements=[Replicate()] * mesh.ndim)
            local: Tensor = full.to_local(grad_placements=gradient_placements)
            scaled: Tensor = ScaleGradient.apply(local, gradient_scale)
            return scaled

        return property(read)

    for name in names:
        value = getattr(module, name)
        sharded = distribute_tensor(value.detach(), mesh, placements)
        module.register_parameter(name, nn.Parameter(sharded))
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {name: make_property(name) for name in names})
