"""Where modules keep their tensors: read there, a tensor costs no search through attributes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["Slot", "hang"]

Slot = tuple[dict[str, Any], str]
"""A module's own table, and a key of it: what is exchanged for the tensor is found there too."""


def hang(root: nn.Module, name: str, tensor: torch.Tensor, *, is_saved: bool) -> Slot:
    """Register a tensor under its dotted name; modules on the way are made where there are none.

    A child may be called as a method of `root`: attribute access finds the method, and everything
    that goes through all modules finds the child.
    """
    *path, last = name.split(".")
    for part in path:
        root = root._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
    if isinstance(tensor, nn.Parameter):
        root._parameters[last] = tensor
        return root._parameters, last
    root._buffers[last] = tensor
    if not is_saved:
        root._non_persistent_buffers_set.add(last)
    return root._buffers, last
