"""What a compiled function or module was made of."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["uncompiled"]


def uncompiled(fn: Any) -> Any:
    """The function that torch.compile was given, or what it is given itself."""
    if isinstance(fn, nn.Module):
        return getattr(fn, "_orig_mod", fn)
    return getattr(fn, "_torchdynamo_orig_callable", fn)
