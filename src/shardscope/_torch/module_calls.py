"""Every call of every module, shown to watchers as it begins and ends.

`nn.Module.__call__` is wrapped, not hooked: torch's global hooks run before a module's own, and so
would place the all-reduce of a tensor-parallel output hook in the parent. torch.compile sees the
unwrapped method, so that its graphs and guards are the same with and without us.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, Protocol

import torch
from torch import nn

from shardscope._torch.private import find_name, is_missing
from shardscope._torch.uncompiled import keep_uncompiled

__all__ = ["CALL_CODE", "ModuleWatcher", "watch_module_calls"]


# Dynamo must keep its own reference to the unwrapped method before we wrap it.
find_name("torch._dynamo", "keep module calls out of compiled graphs")
_skip_code = find_name(
    "torch._dynamo.eval_frame.skip_code", "keep module calls out of compiled graphs"
)


class ModuleWatcher(Protocol):
    """Someone who wants to know which module runs. Must not raise."""

    def enter(self, module: nn.Module) -> None:
        """`module` is called on this thread."""

    def exit(self, module: nn.Module) -> None:
        """The innermost call on this thread, of `module`, has ended, perhaps by an exception."""


_torchs_own = nn.Module.__call__
_calls_impl = hasattr(nn.Module, "_call_impl") and hasattr(nn.Module, "_compiled_call_impl")
_unwrapped = _torchs_own  # or what another tool had put in its place when we came
_above: Any = None  # what another tool had put in our place when we left; it calls us
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_watchers: tuple[ModuleWatcher, ...] = ()
_lock = threading.RLock()


def _watched_call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    if _is_dynamo_compiling():
        return _unwrapped(module, *args, **kwargs)
    watchers = _watchers
    for watcher in watchers:
        watcher.enter(module)
    try:
        if _unwrapped is not _torchs_own or not _calls_impl:
            return _unwrapped(module, *args, **kwargs)
        # What torch's own does: to call it would take a deep model past the limit of recursion.
        if module._compiled_call_impl is not None:
            return module._compiled_call_impl(*args, **kwargs)
        return module._call_impl(*args, **kwargs)
    finally:
        for watcher in watchers:
            watcher.exit(module)


CALL_CODE: CodeType = _watched_call.__code__
"""The code that every watched module call runs through, to be known on a stack of frames."""


@contextmanager
def watch_module_calls(watcher: ModuleWatcher) -> Iterator[None]:
    """Tell `watcher` of module calls on any thread until the context ends."""
    global _watchers
    for method in (type(watcher).enter, type(watcher).exit):
        keep_uncompiled(method.__code__)
    with _lock:
        _watchers = (*_watchers, watcher)
        if len(_watchers) == 1:
            _wrap()
    try:
        yield
    finally:
        with _lock:
            _watchers = tuple(other for other in _watchers if other is not watcher)
            if not _watchers:
                _unwrap()


def _wrap() -> None:
    global _unwrapped
    if not is_missing(_skip_code):
        _skip_code(CALL_CODE)
    if nn.Module.__call__ not in (_above, _watched_call):
        _unwrapped = nn.Module.__call__
        nn.Module.__call__ = _watched_call


def _unwrap() -> None:
    global _above
    is_ours = nn.Module.__call__ in (_watched_call, _unwrapped)
    _above = None if is_ours else nn.Module.__call__
    _exchange(_watched_call, _unwrapped)


def _exchange(found: Any, wanted: Any) -> None:
    """Put `wanted` in place, unless another tool has meanwhile put its own there."""
    if nn.Module.__call__ is found:
        nn.Module.__call__ = wanted
