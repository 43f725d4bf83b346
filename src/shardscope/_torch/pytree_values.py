"""Nested values as flat lists and back, torch's own named tuples among them."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["flatten", "unflatten", "version_of"]

flatten = tree_flatten
unflatten = tree_unflatten


def version_of(tensor: torch.Tensor) -> int | None:
    """How many times `tensor` was written to; None where torch does not count it."""
    return None if tensor.is_inference() else int(tensor._version)
