"""Dispatch modes that check ops against their schemas or fake kernels; TorchScript of a graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from shardscope._torch.dispatch import is_higher_order
from shardscope._torch.private import find_name

CrossRefFakeMode = find_name(
    "torch._subclasses.CrossRefFakeMode", "compare ops with their fake implementations"
)
SchemaCheckMode = find_name(
    "torch._subclasses.schema_check_mode.SchemaCheckMode", "compare ops with their schemas"
)


def check_schemas() -> AbstractContextManager[Any]:
    """A mode that raises if an op mutates or aliases an argument contrary to its schema."""
    mode: AbstractContextManager[Any] = _ignore_higher_order(SchemaCheckMode)()
    return mode


def check_fakes(is_trusted: Callable[[Any], bool] | None = None) -> AbstractContextManager[Any]:
    """A mode that raises if an untrusted op's result differs from that of its fake kernel."""
    mode: AbstractContextManager[Any] = _ignore_higher_order(CrossRefFakeMode)(is_trusted)
    return mode


def _ignore_higher_order(mode: type[Any]) -> type[Any]:
    """The mode, ignoring higher-order ops."""

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_higher_order(func):
            return func(*args, **(kwargs or {}))
        return mode.__torch_dispatch__(self, func, types, args, kwargs)

    members = {"supports_higher_order_operators": True, "__torch_dispatch__": dispatch}
    return type(mode.__name__, (mode,), members)


def compile_script(gm: torch.fx.GraphModule) -> Callable[..., Any]:
    """`gm` in TorchScript, without autocasting: the graph contains its casts."""
    with _no_autocast(), warnings.catch_warnings():
        # TorchScript is deprecated, and does not read annotations in `__init__`.
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
