"""TorchScript, whose makers deprecated it and left it working."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["compile_script"]


def compile_script(gm: torch.fx.GraphModule) -> Callable[..., Any]:
    """`gm` in TorchScript; casts that the graph has are not made twice."""
    with _no_autocast(), warnings.catch_warnings():
        # That it is deprecated, and that it does not read annotations in `__init__`.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)  # the same since torch 2.14
        warnings.filterwarnings("ignore", category=UserWarning, message="The TorchScript type")
        script: Callable[..., Any] = torch.jit.script(gm)
    return script


@contextmanager
def _no_autocast() -> Iterator[None]:
    before = torch._C._jit_set_autocast_mode(False)
    try:
        yield
    finally:
        torch._C._jit_set_autocast_mode(before)
