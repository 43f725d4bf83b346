"""Copies of a program's inputs, which share storage with each other as the originals do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardscope.compile.diagnose.leaves import is_computed, make_computed

__all__ = ["copy_inputs"]

Change = Callable[[Tensor], Tensor]


def copy_inputs(inputs: Sequence[Any], change: Change = lambda tensor: tensor) -> list[Any]:
    """A copy of each value, with the original's `requires_grad`, and a leaf where that is one.

    `change` is applied to the copied data, for example to convert its dtype.
    """
    copied: dict[int, Tensor] = {}
    for group in _share_memory(inputs):
        copied.update(_copy_group(group, change))
    return [_dress(one, copied[id(one)]) if isinstance(one, Tensor) else one for one in inputs]


def _share_memory(inputs: Sequence[Any]) -> list[list[Tensor]]:
    """Tensors grouped by storage; subclasses and other layouts form groups of their own."""
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for one in {id(one): one for one in inputs if isinstance(one, Tensor)}.values():
        if type(one) in (Tensor, nn.Parameter) and one.layout is torch.strided and one.numel():
            groups[one.untyped_storage().data_ptr(), one.dtype].append(one)
        else:
            groups[id(one)].append(one)
    return list(groups.values())


def _copy_group(group: Sequence[Tensor], change: Change) -> dict[int, Tensor]:
    if len(group) == 1 and not _is_spread(group[0]):
        return {id(group[0]): change(group[0].detach().clone())}
    begin = min(one.storage_offset() for one in group)
    end = max(one.storage_offset() + _extent(one) for one in group)
    with torch.no_grad():
        flat = change(group[0].detach().as_strided((end - begin,), (1,), begin).clone())
    return {
        id(one): flat.as_strided(one.shape, one.stride(), one.storage_offset() - begin)
        for one in group
    }


def _is_spread(tensor: Tensor) -> bool:
    """Whether a plain clone would have other strides."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return tensor.numel() > 0 and _extent(tensor) != tensor.numel()


def _extent(tensor: Tensor) -> int:
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _dress(original: Tensor, copied: Tensor) -> Tensor:
    if isinstance(original, nn.Parameter):
        return nn.Parameter(copied, requires_grad=original.requires_grad)
    if not original.requires_grad:
        return copied
    leaf = copied.detach().requires_grad_()
    return make_computed(leaf) if is_computed(original) else leaf
