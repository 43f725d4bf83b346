"""Reports the begin and end of every module call to watchers.

`nn.Module.__call__` is patched: torch's global hooks run before a module's own, and so would
attribute the all-reduce of a tensor-parallel output hook to the parent. torch.compile sees the
original method, so that graphs and guards are the same with and without the patch.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, Protocol

import torch
from torch import nn

from shardscope._torch.private import find_name, is_missing
from shardscope._torch.skip_dynamo import skip_dynamo

# Dynamo must keep its own reference to the unwrapped method before we wrap it.
find_name("torch._dynamo", "keep module calls out of compiled graphs")
_skip_code = find_name(
    "torch._dynamo.eval_frame.skip_code", "keep module calls out of compiled graphs"
)


class ModuleWatcher(Protocol):
    """Called at the begin and end of module calls. Must not raise."""

    def enter(self, module: nn.Module) -> None:
        """`module` is called on this thread."""

    def exit(self, module: nn.Module) -> None:
        """The innermost call on this thread, of `module`, has ended, perhaps by an exception."""


class ResultWatcher(Protocol):
    """Called with what module calls take and return. Must not raise."""

    def begin_call(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """`module` is about to run with these arguments."""

    def end_call(self, module: nn.Module, result: Any) -> None:
        """The call of `module`, the innermost on this thread, has returned `result`."""


CallReplacement = Callable[[nn.Module, Callable[..., Any], Any, dict[str, Any]], Any]
"""Called with a module, the function that runs its call, args and kwargs; returns the result."""

_torchs_own = nn.Module.__call__
_calls_impl = hasattr(nn.Module, "_call_impl") and hasattr(nn.Module, "_compiled_call_impl")
_unwrapped = _torchs_own  # or the method that another tool had installed before us
_outer_wrapper: Any = None  # the method that another tool installed over ours; it calls ours
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_watchers: tuple[ModuleWatcher, ...] = ()
_result_watchers: tuple[ResultWatcher, ...] = ()
_lock = threading.RLock()
_replacement: CallReplacement | None = None
_replacing = threading.local()  # whether this thread is inside a replaced call


def _watched_call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    if _is_dynamo_compiling():
        return _unwrapped(module, *args, **kwargs)
    watchers = _watchers
    for watcher in watchers:
        watcher.enter(module)
    if _watchers is not watchers:  # a watcher has added others, which see this call too
        added = tuple(watcher for watcher in _watchers if watcher not in watchers)
        for watcher in added:
            watcher.enter(module)
        watchers += added
    try:
        if _replacement is not None and not getattr(_replacing, "is_on", False):
            return _replace_call(_replacement, module, args, kwargs)
        observers = _result_watchers
        for observer in observers:
            observer.begin_call(module, args, kwargs)
        if _unwrapped is not _torchs_own or not _calls_impl:
            result = _unwrapped(module, *args, **kwargs)
        # The same as torch's method; calling that would take deep models past the recursion limit.
        elif module._compiled_call_impl is not None:
            result = module._compiled_call_impl(*args, **kwargs)
        else:
            result = module._call_impl(*args, **kwargs)
        for observer in observers:
            observer.end_call(module, result)
        return result
    finally:
        for watcher in watchers:
            watcher.exit(module)


CALL_CODE: CodeType = _watched_call.__code__
"""The code object of every watched module call, by which stack frames are recognised."""


def _replace_call(
    replacement: CallReplacement, module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> Any:
    _replacing.is_on = True
    try:
        return replacement(module, functools.partial(_unwrapped, module), args, kwargs)
    finally:
        _replacing.is_on = False


@contextmanager
def replaced_outermost_calls(replacement: CallReplacement) -> Iterator[None]:
    """Let `replacement` run the calls of watched modules that no other module makes.

    Inside another such context, it runs them by calling that one's replacement.
    """
    global _replacement
    outer = _replacement
    _replacement = replacement if outer is None else _nest(outer, replacement)
    try:
        yield
    finally:
        _replacement = outer


def _nest(outer: CallReplacement, inner: CallReplacement) -> CallReplacement:
    def replace(
        module: nn.Module, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            return outer(module, call, args, kwargs)

        return inner(module, run, args, kwargs)

    return replace


@contextmanager
def watch_module_calls(watcher: ModuleWatcher) -> Iterator[None]:
    """Report module calls on any thread to `watcher` until the context ends."""
    global _watchers
    for method in (type(watcher).enter, type(watcher).exit):
        skip_dynamo(method.__code__)
    with _lock:
        _watchers = (*_watchers, watcher)
        if len(_watchers) == 1:
            _wrap()
    try:
        yield
    finally:
        with _lock:
            _watchers = tuple(active for active in _watchers if active is not watcher)
            if not _watchers:
                _unwrap()


@contextmanager
def watch_results(watcher: ResultWatcher) -> Iterator[None]:
    """Report results to `watcher` until the context ends, while module calls are watched, too."""
    global _result_watchers
    for method in (type(watcher).begin_call, type(watcher).end_call):
        skip_dynamo(method.__code__)
    with _lock:
        _result_watchers = (*_result_watchers, watcher)
    try:
        yield
    finally:
        with _lock:
            _result_watchers = tuple(active for active in _result_watchers if active is not watcher)


def _wrap() -> None:
    global _unwrapped
    if not is_missing(_skip_code):
        _skip_code(CALL_CODE)
    if nn.Module.__call__ not in (_outer_wrapper, _watched_call):
        _unwrapped = nn.Module.__call__
        nn.Module.__call__ = _watched_call


def _unwrap() -> None:
    global _outer_wrapper
    is_ours = nn.Module.__call__ in (_watched_call, _unwrapped)
    _outer_wrapper = None if is_ours else nn.Module.__call__
    _exchange(_watched_call, _unwrapped)


def _exchange(expected: Any, replacement: Any) -> None:
    """Install `replacement`, unless another tool has replaced `expected` in between."""
    if nn.Module.__call__ is expected:
        nn.Module.__call__ = replacement
