"""Tensor and context parallelism of the decoder by hand, and losses inside layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from benchmarks.silent.correct_by_hand import Copy, Gather, Group, Reduce, all_gather, keep_part
from benchmarks.silent.decoder import Decoder
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


class AttachedLoss(torch.autograd.Function):
    """Returns a tensor, and in backward starts that of a loss, whose gradient is `scale`."""

    scale = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (loss,) = ctx.saved_tensors
        return gradient, torch.full_like(loss, AttachedLoss.scale)


def apply_tp(model: Decoder, group: Group) -> None:
    """Keep a part of the heads and of the hidden dim of each layer; the others are replicated."""
    for layer in model.layers.values():
        for linear, dim in (
            (layer.attention.wq, 0),
            (layer.attention.wk, 0),
            (layer.attention.wv, 0),
            (layer.attention.wo, 1),
            (layer.feed_forward.w1, 0),
            (layer.feed_forward.w3, 0),
            (layer.feed_forward.w2, 1),
        ):
            keep_part(linear, "weight", dim, group)
            linear.weight.is_sharded = True
        for module in (layer.attention, layer.feed_forward):
            module.register_forward_pre_hook(
                lambda _, inputs: (Copy.apply(inputs[0], group), *inputs[1:])
            )
            module.register_forward_hook(lambda _, __, output: Reduce.apply(output, group))


def apply_cp(model: Decoder, group: Group) -> None:
    """Gather keys and values along the sequence before the kernel of each layer."""

    def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        q, k, v, mask, scale = inputs
        return q, Gather.apply(k, 1, group), Gather.apply(v, 1, group), mask, scale

    for layer in model.layers.values():
        layer.attention.inner_attention.register_forward_pre_hook(gather)


def shard_sequence(batch: tuple[Tensor, Tensor], mesh: DeviceMesh) -> tuple[Tensor, ...]:
    """This rank's tokens and labels, their positions, and which of all tokens each query sees."""
    rank, size = mesh.get_local_rank("cp"), mesh["cp"].size()
    tokens, labels = (x.chunk(size, 1)[rank] for x in batch)
    positions = torch.arange(batch[0].shape[1]).chunk(size)[rank]
    mask = positions[:, None] >= all_gather(positions, 0, mesh.get_group("cp"))[None, :]
    return tokens, labels, positions, mask


def reduce_gradients(model: nn.Module, group: Group, op: Any = dist.ReduceOp.SUM) -> None:
    """All-reduce every gradient over a group."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, op=op, group=group)
