"""Ops by the functions that Python has for them.

An op that is called as `torch.ops.aten.t.default` has its arguments matched with its schema each
time, which takes longer than a small op itself. These functions were made to be called from Python,
and do the same. Those that make tensors from nothing are not among them: a device that is set as
the default would change what they do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardscope._torch.dispatch import is_overload, op_schema

__all__ = ["PYTHON_CALLS", "python_call"]

_SAME_NAME = """
    abs add.Tensor addmm all.dim amax any.dim argmax baddbmm bitwise_and.Tensor bitwise_not
    bitwise_or.Tensor bmm cat clamp clamp_min clone cos cumsum div.Tensor embedding eq.Scalar
    eq.Tensor erf exp flip ge.Scalar ge.Tensor gt.Scalar gt.Tensor index_select layer_norm le.Scalar
    le.Tensor log logical_and logical_not logical_or logsumexp.default lt.Scalar lt.Tensor matmul
    masked_fill.Scalar masked_fill.Tensor maximum mean.dim minimum mm mul.Tensor native_layer_norm
    ne.Scalar ne.Tensor neg permute pow.Tensor_Scalar reciprocal relu reshape rms_norm rsqrt
    rsub.Scalar select.int sigmoid sin softmax.int sqrt squeeze.dim stack sub.Tensor sum
    sum.dim_IntList t tanh transpose.int tril triu unsqueeze var.dim where.self
"""
_METHODS = "contiguous expand masked_fill_.Scalar repeat to.dtype type_as view"


def _find_calls() -> dict[str, Callable[..., Any]]:
    calls = {_full_name(name): getattr(torch, _packet(name)) for name in _SAME_NAME.split()}
    calls |= {_full_name(name): getattr(Tensor, _packet(name)) for name in _METHODS.split()}
    return calls | {
        "gelu.default": functional.gelu,
        "linear.default": functional.linear,
        "scaled_dot_product_attention.default": functional.scaled_dot_product_attention,
        "silu.default": functional.silu,
    }


def _full_name(name: str) -> str:
    return name if "." in name else f"{name}.default"


def _packet(name: str) -> str:
    return name.split(".")[0]


PYTHON_CALLS: Mapping[str, Callable[..., Any]] = _find_calls()
"""By the name of an overload of ATen's."""


def python_call(op: Any) -> Callable[..., Any]:
    """What to call for `op`: it, or something faster that does the same."""
    if not is_overload(op):
        call: Callable[..., Any] = op
        return call
    schema = op_schema(op)
    namespace, _, name = schema.name.partition("::")
    if namespace != "aten":
        return op  # type: ignore[no-any-return]
    return PYTHON_CALLS.get(f"{name}.{schema.overload_name or 'default'}", op)
