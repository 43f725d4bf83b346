"""Ops behind public functions that exported programs name themselves."""

from __future__ import annotations

import torch

__all__ = ["FUSED_RMS_NORM"]

_aten = torch.ops.aten

FUSED_RMS_NORM = _aten._fused_rms_norm.default
"""What rms_norm is on an accelerator: it also returns what its backward needs."""
