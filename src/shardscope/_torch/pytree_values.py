"""Nested values as flat lists and back, torch's own named tuples among them."""

from __future__ import annotations

import torch

from shardscope._torch.private import find_name

__all__ = ["flatten", "leaves_with_path", "unflatten", "version_of"]

flatten = find_name("torch.utils._pytree.tree_flatten", "list the inputs of a program")
leaves_with_path = find_name(
    "torch.utils._pytree.tree_leaves_with_path", "name the inputs and outputs of a program"
)
unflatten = find_name(
    "torch.utils._pytree.tree_unflatten", "restore the structure of a program's inputs and outputs"
)


def version_of(tensor: torch.Tensor) -> int | None:
    """How many times `tensor` was written to; None where torch does not count it."""
    return None if tensor.is_inference() else int(tensor._version)
