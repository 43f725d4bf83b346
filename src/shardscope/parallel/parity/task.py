"""What to run: inputs, and what to make of the output, the same for every run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import nn

from shardscope.parallel.parity.outcome import named_tensors
from shardscope.shard.stand_ins import map_tensors

__all__ = ["Task", "call_model", "default_loss", "shard_batch"]

Loss = Callable[[Any], Any]
Step = Callable[[nn.Module, Any], Any]


@final
@dataclass(frozen=True, eq=False)
class Task:
    """One step: `step(model, inputs)` where the user wrote one, else call, loss, backward.

    `loss_scale` makes up for gradients that are averaged over ranks with batches of their own.
    Without `has_backward` the model is only called.
    """

    inputs: Any
    loss: Loss | None = None
    step: Step | None = None
    seed: int = 0
    loss_scale: float = 1.0
    has_backward: bool = True

    def copy_inputs(self) -> Any:
        """The inputs for one run, which may change them."""
        return map_tensors(self.inputs, _copy)

    def with_inputs(self, inputs: Any, *, loss_scale: float | None = None) -> Task:
        """The same for other inputs."""
        scale = self.loss_scale if loss_scale is None else loss_scale
        return replace(self, inputs=inputs, loss_scale=scale)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return copy.copy(tensor.detach()).clone().requires_grad_(tensor.requires_grad)


def call_model(model: nn.Module, inputs: Any) -> Any:
    """As TARGETs do: a mapping is keywords, a tuple or list arguments, all else one argument."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def default_loss(output: Any) -> list[torch.Tensor]:
    """A loss for each tensor of the output that has a gradient.

    Elementwise and summed, so that it is the same for a whole and for its pieces. Not linear: the
    sum of what a softmax or a norm puts out is constant, and its gradient nothing but noise.
    """
    losses = []
    for _, tensor in named_tensors(output):
        if not tensor.requires_grad:
            continue
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        wide = real if real.dtype is torch.float64 else real.float()
        losses.append(((wide * wide + 1).sqrt() + wide * 0.5).sum())
    return losses


def shard_batch(inputs: Any, *, dim: int, num_shards: int, index: int) -> Any:
    """One rank's share of a batch: of each tensor as long along the dim as the first is."""
    sizes = [one.shape[dim] for _, one in named_tensors(inputs) if one.ndim > dim]
    size = sizes[0] if sizes else 0

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim <= dim or tensor.shape[dim] != size:
            return tensor
        chunks = tensor.tensor_split(num_shards, dim)
        return chunks[index].detach().requires_grad_(tensor.requires_grad)

    return map_tensors(inputs, cut)
