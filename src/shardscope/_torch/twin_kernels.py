"""Kernels that compute what another does, and that torch's FLOP counter does not know."""

from __future__ import annotations

from shardscope._torch.private import find_name

__all__ = ["TWIN_KERNELS"]

_NEED = "count the FLOPs of attention on the CPU"
_FLASH = "torch.ops.aten._scaled_dot_product_flash_attention"

TWIN_KERNELS = {
    "_scaled_dot_product_flash_attention_for_cpu": find_name(_FLASH, _NEED),
    "_scaled_dot_product_flash_attention_for_cpu_backward": find_name(f"{_FLASH}_backward", _NEED),
}
"""By the name of one, the other, which it knows."""
