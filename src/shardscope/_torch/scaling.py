"""Many tensors times one number, in one call."""

from __future__ import annotations

import torch

__all__ = ["scale_all"]


def scale_all(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply each of them in place."""
    if tensors:
        torch._foreach_mul_(tensors, factor)
