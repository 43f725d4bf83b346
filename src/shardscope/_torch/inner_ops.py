"""Ops behind public functions that exported programs name themselves."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["INNER_OPS", "inner_op"]

INNER_OPS = (
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "embedding_bag",
    "embedding_bag_forward_only",
    "fused_rms_norm",
    "grouped_mm",
    "log_softmax",
    "native_batch_norm_legit",
    "native_batch_norm_legit.no_stats",
    "native_batch_norm_legit_functional",
    "native_batch_norm_legit_no_training",
    "reshape_alias",
    "safe_softmax",
    "scaled_dot_product_cudnn_attention",
    "scaled_dot_product_efficient_attention",
    "scaled_dot_product_flash_attention",
    "scaled_dot_product_flash_attention_for_cpu",
    "softmax",
    "to_copy",
    "unsafe_view",
    "upsample_bicubic2d_aa",
    "upsample_bicubic2d_aa.vec",
    "upsample_bilinear2d_aa",
    "upsample_bilinear2d_aa.vec",
    "upsample_nearest_exact1d",
    "upsample_nearest_exact1d.vec",
    "upsample_nearest_exact2d",
    "upsample_nearest_exact2d.vec",
    "upsample_nearest_exact3d",
    "upsample_nearest_exact3d.vec",
)


def inner_op(name: str) -> Any:
    """The aten op of that name with an underscore before it; None where torch has it not.

    `softmax` is `aten._softmax.default`, `native_batch_norm_legit.no_stats` another overload.
    """
    assert name in INNER_OPS, f"list {name} among the inner ops, so that its canary watches it"
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, f"_{packet}", None), overload or "default", None)
