"""Functions and modules that torch.compile was applied to, and what it wrapped."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardscope._torch.modules import is_compiled

__all__ = ["has_compile_wrapper", "uncompiled"]


def uncompiled(fn: Any) -> Any:
    """The function or module that torch.compile wrapped; `fn` itself where it is no wrapper."""
    if isinstance(fn, nn.Module):
        return getattr(fn, "_orig_mod", fn)
    return fn._torchdynamo_orig_callable if has_compile_wrapper(fn) else fn


def has_compile_wrapper(fn: Any) -> bool:
    """Whether `fn` is a result of torch.compile, or a module that was compiled in place."""
    if isinstance(fn, nn.Module):
        return is_compiled(fn)
    # A result of torch.compiler.disable has the first attribute too.
    is_wrapper = hasattr(fn, "_torchdynamo_orig_callable")
    return is_wrapper and not getattr(fn, "_torchdynamo_disable", False)
