"""Kernels that compute what another does, and that torch's FLOP counter does not know."""

from __future__ import annotations

import torch

__all__ = ["TWIN_KERNELS"]

_aten = torch.ops.aten

TWIN_KERNELS = {
    "_scaled_dot_product_flash_attention_for_cpu": _aten._scaled_dot_product_flash_attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        _aten._scaled_dot_product_flash_attention_backward
    ),
}
"""By the name of one, the other, which it knows."""
