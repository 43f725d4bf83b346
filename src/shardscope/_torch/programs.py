"""What lies behind the values that torch.export traced."""

from __future__ import annotations

from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["expression_of", "fake_mode_of", "flatten", "unflatten"]


def expression_of(size: Any) -> Any:
    """The sympy expression of a size that was left open; anything else as it is.

    Comparing a SymInt would add a guard to the program; comparing its expression does not.
    """
    if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_Integer else expression


def fake_mode_of(values: Any) -> Any:
    """The mode whose tensors without data export traced with; a new one where there are none."""
    return detect_fake_mode(values) or FakeTensorMode()


flatten = tree_flatten
unflatten = tree_unflatten
