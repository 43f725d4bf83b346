"""Group norm: by batch, or by whole groups of channels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardscope.parallel.placements import Shard, divides, product
from shardscope.parallel.rules.book import decomposition, rule, speller
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.local import Local
from shardscope.parallel.rules.terms import lay

__all__ = [
    "cut_group_norm",
    "normalize_groups",
    "spell_group_norm",
    "spell_native_group_norm",
]

aten = torch.ops.aten


@rule(aten.group_norm.default, aten.native_group_norm.default)
def cut_group_norm(call: Call) -> Iterator[Strategy]:
    yield lay(call, {"input": Shard(0)}, Shard(0))
    num_groups = call.arguments.get("num_groups", call.arguments.get("group"))
    # Where an axis before has cut the channels, groups may not divide them any more.
    if divides(call.num_ranks, num_groups) and divides(num_groups, call["input"].shape[1]):
        cuts = {"input": Shard(1), "weight": Shard(0), "bias": Shard(0)}
        yield lay(call, cuts, Shard(1), is_order_blind=False)


@speller(aten.group_norm.default)
def spell_group_norm(local: Local) -> Any:
    return local.repeat(num_groups=_num_groups(local, local["num_groups"]))


@speller(aten.native_group_norm.default)
def spell_native_group_norm(local: Local) -> Any:
    shape, pen = local.outputs[0].local_shape(local.seat), local.pen
    return local.repeat(
        N=pen.size(shape[0]),
        C=pen.size(shape[1]),
        HxW=pen.size(product(shape[2:])),
        group=_num_groups(local, local["group"]),
    )


def _num_groups(local: Local, num_groups: int) -> int:
    layout = local.input_layout("input")
    here, all_ = layout.local_shape(local.seat)[1], layout.shape[1]
    assert num_groups * here % all_ == 0, "a rank has to hold whole groups"
    return int(num_groups * here // all_)


@decomposition(aten.group_norm.default)
def normalize_groups(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """Sums over a group's channels and pixels, whichever of them are cut."""
    wide = input.float() if input.dtype in (torch.half, torch.bfloat16) else input
    groups = wide.reshape(wide.shape[0], num_groups, -1, *wide.shape[2:])
    dims = list(range(2, groups.dim()))
    count = math.prod(groups.shape[2:])
    centred = groups - groups.sum(dims, keepdim=True) / count
    variance = (centred * centred).sum(dims, keepdim=True) / count
    result = (centred * torch.rsqrt(variance + eps)).flatten(1, 2)
    shape = [-1] + [1] * (input.dim() - 2)
    if weight is not None:
        result = result * weight.reshape(shape)
    if bias is not None:
        result = result + bias.reshape(shape)
    return result.to(input.dtype)
