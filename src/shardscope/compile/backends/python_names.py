"""Names that Python and torch.nn have for ops, and aten's own for the same."""

from __future__ import annotations

import re
from functools import cache

import torch
from torch import nn

__all__ = ["OTHER_NAMES", "SYMBOLS", "WIDER", "module_op"]

SYMBOLS = {
    "+": "add",
    "-": "sub",
    "*": "mul",
    "/": "div",
    "//": "floor_divide",
    "%": "remainder",
    "**": "pow",
    "@": "matmul",
    "&": "bitwise_and",
    "|": "bitwise_or",
    "^": "bitwise_xor",
    "~": "bitwise_not",
    "<<": "bitwise_left_shift",
    ">>": "bitwise_right_shift",
    "<": "lt",
    "<=": "le",
    "==": "eq",
    "!=": "ne",
    ">": "gt",
    ">=": "ge",
}
SYMBOLS |= {
    f"{symbol}=": name for symbol, name in list(SYMBOLS.items())[: list(SYMBOLS).index("<")]
}
"""Operators of Python's, and those that assign."""

# What the same op is called by `operator`, by aliases in torch, and by aten below its own name.
OTHER_NAMES = {
    "absolute": "abs",
    "and_": "bitwise_and",
    "arccos": "acos",
    "arcsin": "asin",
    "arctan": "atan",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "expit": "sigmoid",
    "fix": "trunc",
    "floordiv": "floor_divide",
    "greater": "gt",
    "greater_equal": "ge",
    "iadd": "add",
    "iand": "bitwise_and",
    "ifloordiv": "floor_divide",
    "ilshift": "bitwise_left_shift",
    "imatmul": "matmul",
    "imod": "remainder",
    "imul": "mul",
    "inv": "bitwise_not",
    "invert": "bitwise_not",
    "ior": "bitwise_or",
    "ipow": "pow",
    "irshift": "bitwise_right_shift",
    "isub": "sub",
    "itruediv": "div",
    "ixor": "bitwise_xor",
    "less": "lt",
    "less_equal": "le",
    "lshift": "bitwise_left_shift",
    "mod": "remainder",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "or_": "bitwise_or",
    "pos": "positive",
    "rshift": "bitwise_right_shift",
    "subtract": "sub",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "to_copy": "to",
    "true_divide": "div",
    "truediv": "div",
    "xor": "bitwise_xor",
}

# What an op is run by, below the name that people write; composite ops alone have such.
WIDER = {
    "conv1d": ("convolution",),
    "conv2d": ("convolution",),
    "conv3d": ("convolution",),
    "conv_transpose1d": ("convolution",),
    "conv_transpose2d": ("convolution",),
    "conv_transpose3d": ("convolution",),
    "max_pool2d": ("max_pool2d_with_indices",),
    "max_pool3d": ("max_pool3d_with_indices",),
    "nll_loss": ("nll_loss_forward", "nll_loss2d_forward"),
}

_MODULES = {
    "bcewithlogitsloss": "binary_cross_entropy_with_logits",
    "bceloss": "binary_cross_entropy",
    "multiheadattention": "multi_head_attention_forward",
    "upsample": "interpolate",
}


def module_op(kind: type[nn.Module]) -> str | None:
    """The op that a class of `torch.nn` is a module of: `layer_norm` for `nn.LayerNorm`."""
    if not kind.__module__.startswith("torch.nn."):
        return None
    squeezed = kind.__name__.lower()
    known = _functions()
    candidates = (squeezed, re.sub(r"\dd$", "", squeezed), squeezed.removesuffix("loss"))
    found = (known.get(_MODULES.get(one, one).replace("_", "")) for one in candidates)
    return next((name for name in found if name is not None), None)


@cache
def _functions() -> dict[str, str]:
    """Functions that modules may stand for, by their names without underscores."""
    homes = (torch, nn.functional)
    return {
        name.replace("_", ""): name
        for home in homes
        for name in dir(home)
        if name.islower() and not name.startswith("_") and not name.endswith("_")
    }
