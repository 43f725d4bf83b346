"""Reports every collective of this process to observers before it is issued.

Three kinds of hooks: kernels registered for c10d's ops at a dispatch key, patched callables of
`torch.ops`, and patched methods of `ProcessGroup`. Each collective is reported by the first that it
passes.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any, final

import torch
import torch.distributed as dist
import torch.distributed.tensor  # registers _dtensor ops
import torch.fx
from torch.library import Library

from shardscope._torch.collectives.events import (
    NEEDED_TO_ISSUE,
    OBSERVERS,
    REENTRANCY,
    CollectiveEvent,
    Observer,
    is_tracing,
    issue,
    report_wait,
)
from shardscope._torch.collectives.schema import BATCH, OPS, UNREAD, OpLayout, unread_ops
from shardscope._torch.collectives.unobserved import find_unobserved_calls
from shardscope._torch.dispatch import (
    NEEDED_OF_MODES,
    has_fake_tensors,
    has_modes,
    is_user_mode_active,
)
from shardscope._torch.private import find_name, is_missing, moved_names_explained, require
from shardscope._torch.skip_dynamo import skip_dynamo
from shardscope.errors import TorchVersionError

_NEED = "intercept collectives before their kernels run"

_PYTHON = find_name("torch._C.DispatchKey.Python", _NEED)
_META = find_name("torch._C.DispatchKey.Meta", _NEED)

# Nearly every call has this key, and collectives can be run without it: they create no views and
# count no versions. (BackendSelect, which all calls have, cannot be excluded: every op that creates
# a tensor needs it.)
_KEY = find_name("torch._C.DispatchKey.ADInplaceOrView", _NEED)
_make_keys = find_name("torch._C.DispatchKeySet", _NEED)
_keys_after = find_name("torch._C._dispatch_keyset_full_after", _NEED)
_is_excluded = find_name("torch._C._dispatch_tls_is_dispatch_key_excluded", _NEED)
_is_included = find_name("torch._C._dispatch_tls_is_dispatch_key_included", _NEED)
_included_keys = find_name("torch._C._dispatch_tls_local_include_set", _NEED)
_excluded_keys = find_name("torch._C._dispatch_tls_local_exclude_set", _NEED)
_set_excluded = find_name("torch._C._dispatch_tls_set_dispatch_key_excluded", _NEED)
_force = find_name("torch._C._ForceDispatchKeyGuard", _NEED)
_NEEDED = (
    _PYTHON,
    _META,
    _KEY,
    _make_keys,
    _keys_after,
    _is_excluded,
    _is_included,
    _included_keys,
    _excluded_keys,
    _set_excluded,
    _force,
)
_HAS_ALL = not any(map(is_missing, _NEEDED))
_KEYS, _REST = (_make_keys(_KEY), _keys_after(_KEY)) if _HAS_ALL else (None, None)


@contextmanager
def bypass_hook_key() -> Iterator[None]:
    """A context in which collectives of this thread skip the kernel hooks.

    Hooks that are called for every collective do the same without a context, which is faster.
    """
    if not _HAS_ALL:
        yield
        return
    was_excluded = _is_excluded(_KEY)
    _set_excluded(_KEY, True)
    try:
        yield
    finally:
        _set_excluded(_KEY, was_excluded)


_UNCHANGED = nullcontext()


def force_hook_key() -> AbstractContextManager[None]:
    """Include the hook key, so that collectives of this thread reach the kernel hooks.

    Without it, collectives on inference tensors and those issued by dispatch modes or tensor
    subclasses would skip the hooks.
    """
    is_reached = not _HAS_ALL or (_is_included(_KEY) and not _is_excluded(_KEY))
    return _UNCHANGED if is_reached else _including_hook_key()


@contextmanager
def _including_hook_key() -> Iterator[None]:
    included = _included_keys() | _KEYS
    excluded = _excluded_keys() - _KEYS
    before, REENTRANCY.is_forced = REENTRANCY.is_forced, True
    try:
        with _force(included, excluded):
            yield
    finally:
        REENTRANCY.is_forced = before


@contextmanager
def kernel_hooks() -> Iterator[None]:
    """Report every collective that reaches a kernel of c10d and was not reported before."""
    require(*_NEEDED)
    library = Library("c10d", "IMPL")
    destroy = library._destroy
    try:
        for name, layout in (*OPS["c10d"].items(), *((op, UNREAD) for op in unread_ops("c10d"))):
            packet = getattr(torch.ops.c10d, name, None)
            if packet is not None:
                hook = _make_hook(f"c10d.{name}", layout, packet.default)
                library.impl(name, hook, _KEY.name, with_keyset=True)
        yield
    finally:
        destroy()


_ASYNC_OP = "async_op"  # the argument of c10d's ops that says whether the caller goes on at once


def _make_hook(op: str, layout: OpLayout, overload: Any) -> Callable[..., Any]:
    # Not a kernel's call_boxed: it holds the GIL, for which a thread of gloo may be waiting.
    redispatch = overload.redispatch
    names = [argument.name for argument in overload._schema.arguments]
    async_op = names.index(_ASYNC_OP) if _ASYNC_OP in names else None
    has_work = bool(overload._schema.returns)

    def call(keyset: Any, *args: Any) -> Any:
        if not REENTRANCY.is_forced:
            return redispatch(keyset & _REST, *args)
        with bypass_hook_key():  # the hook key was forced: exclude it again
            return redispatch(keyset & _REST, *args)

    def hook(keyset: Any, *args: Any) -> Any:
        if REENTRANCY.depth or _is_not_issued(keyset, args):
            return call(keyset, *args)
        is_async = None if has_work else True
        if async_op is not None:  # torch omits trailing arguments that have their default value
            is_async = async_op >= len(args) or bool(args[async_op])
        event = CollectiveEvent(op, layout, args, is_async=is_async)
        return issue(event, call, (keyset, *args), {})

    for function in (call, hook):
        skip_dynamo(function.__code__)
    return hook


def _is_not_issued(keyset: Any, args: tuple[Any, ...]) -> bool:
    """Whether the call only traces a graph, or is dispatched again by a mode or tensor subclass."""
    is_handled = keyset.has(_PYTHON)
    if is_handled and (is_user_mode_active() or not has_fake_tensors(args)):
        return True
    return bool((is_handled or keyset.has(_META)) and is_tracing())


# It registers its ops when it is loaded.
find_name("torch.distributed._symmetric_memory", "intercept symmetric-memory collectives")
_register_builtin = find_name(
    "torch.jit._builtins._register_builtin",
    "let torch.jit.script compile collectives inside a trace",
)

_Tensor = torch.Tensor


@contextmanager
def op_hooks() -> Iterator[None]:
    """Report every collective that Python calls as an op of `torch.ops`."""
    hooks = _make_op_hooks()
    for entry, hook in hooks:
        hook.call, entry._op = entry._op, hook
    try:
        yield
    finally:
        for entry, hook in hooks:
            if entry._op is hook:
                entry._op = hook.call


@cache
def _make_op_hooks() -> Sequence[tuple[Any, _OpHook]]:
    """The packet and the overload of every collective op, each with the hook to install there."""
    for method in (_OpHook.__call__, _OpHook.call_bypassing):
        skip_dynamo(method.__code__)
    hooks = []
    for namespace, ops in OPS.items():
        for name, layout in (*ops.items(), *((op, UNREAD) for op in unread_ops(namespace))):
            for entry, schema in _entries(namespace, name):
                hook = _OpHook(f"{namespace}.{name}", layout, schema, entry._op)
                if not is_missing(_register_builtin):
                    _register_builtin(hook, f"{namespace}::{name}")  # for torch.jit.script
                hooks.append((entry, hook))
    return hooks


def _entries(namespace: str, name: str) -> list[tuple[Any, Any]]:
    """The packet and the overload of an op, each with the op's schema; empty if torch lacks it."""
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:  # this torch has no such op
        return []
    return [(packet, packet.default._schema), (packet.default, packet.default._schema)]


@final
class _OpHook:
    """Replaces the callable of an op; it hashes like the callable, by which torch hashes ops."""

    __slots__ = (
        "__weakref__",
        "_bypasses_kernel_hook",
        "_forces_key",
        "_layout",
        "_op_name",
        "_positions",
        "call",
    )

    def __init__(self, op: str, layout: OpLayout, schema: Any, call: Callable[..., Any]) -> None:
        self._op_name = op
        self._layout = layout
        self._positions = [
            (argument.name, argument.default_value)
            for argument in schema.arguments
            if not argument.kwarg_only
        ]
        # The kernels of functional collectives run nothing but c10d's, whose hook can be skipped.
        self._bypasses_kernel_hook = op.startswith("_c10d_functional") and layout is not BATCH
        self._forces_key = op.startswith("c10d.")
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._forces_key:
            with force_hook_key():
                return self.call(*args, **kwargs)
        if REENTRANCY.depth or is_user_mode_active():
            return self.call(*args, **kwargs)
        if self._bypasses_kernel_hook and args and type(args[0]) is _Tensor and not args[0].is_meta:
            return issue(self._read_event(args, kwargs), self.call_bypassing, args, kwargs)
        if any(isinstance(arg, torch.fx.Proxy) for arg in args):
            return self.call(*args, **kwargs)
        if is_tracing():
            return self._trace(args, kwargs)
        return issue(self._read_event(args, kwargs), self.call, args, kwargs)

    def call_bypassing(self, *args: Any, **kwargs: Any) -> Any:
        """Call the op without reaching the hook of c10d's kernels."""
        if not _HAS_ALL:
            return self.call(*args, **kwargs)
        was_excluded = _is_excluded(_KEY)
        _set_excluded(_KEY, True)
        try:
            return self.call(*args, **kwargs)
        finally:
            _set_excluded(_KEY, was_excluded)

    def _read_event(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CollectiveEvent:
        """The event of a call of the op."""
        is_complete = len(args) == len(self._positions)
        positional = args if is_complete else self._positional(args, kwargs)
        return CollectiveEvent(self._op_name, self._layout, positional, kwargs.get("out"))

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the op while a graph is traced; ops on fake tensors inside are not issued either."""
        REENTRANCY.depth = int(has_fake_tensors(args))
        try:
            return self.call(*args, **kwargs)
        finally:
            REENTRANCY.depth = 0

    def _positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """All arguments by position, with defaults for those that were omitted."""
        missing = self._positions[len(args) :]
        return (*args, *(kwargs.get(name, default) for name, default in missing))

    def __hash__(self) -> int:
        return hash(self.call)

    def __eq__(self, value: object) -> bool:
        return self is value or self.call is value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.call, name)


_PLAIN = (torch.Tensor, torch.nn.Parameter)

# By method: the op that it calls, and whether the options, its last argument, have a reduction.
_OBSERVED_METHODS = {
    "allreduce": ("allreduce_", True),
    "_allgather_base": ("_allgather_base_", False),
    "all_gather_single": ("_allgather_base_", False),
    "_reduce_scatter_base": ("_reduce_scatter_base_", True),
    "reduce_scatter_single": ("_reduce_scatter_base_", True),
}
_FORCED_METHODS = (
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "gather_into_tensor",
    "gather_single",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)


@contextmanager
def method_hooks() -> Iterator[None]:
    """Report collectives issued by methods of a process group, and DDP's broadcasts of buffers."""
    with ExitStack() as stack:
        for name, (op, reduces) in _OBSERVED_METHODS.items():
            _replace(stack, dist.ProcessGroup, name, _wrap_observed(op, reduces=reduces))
        for name in _FORCED_METHODS:
            _replace(stack, dist.ProcessGroup, name, _wrap_forcing)
        _replace(stack, dist, "_broadcast_coalesced", _wrap_forcing)
        _replace(stack, dist.Work, "wait", _wrap_wait)
        # One-sided: transfers through a window reach no hook.
        _replace(stack, dist.ProcessGroup, "new_window", _wrap_unread("c10d.new_window"))
        for place, owner, names in find_unobserved_calls():
            for name in names:
                _replace(stack, owner, name, _wrap_unread(f"{place}.{name}"))
        yield


def _replace(
    stack: ExitStack, owner: Any, name: str, make_hook: Callable[[Any], Callable[..., Any]]
) -> None:
    original = vars(owner).get(name)  # not by getattr: the result would not bind when restored
    if original is not None:  # this torch has it
        stack.callback(setattr, owner, name, original)
        setattr(owner, name, make_hook(getattr(owner, name)))


def _wrap_unread(op: str) -> Callable[[Any], Callable[..., Any]]:
    def make_hook(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def hook(*args: Any, **kwargs: Any) -> Any:
            if REENTRANCY.depth or is_tracing():
                return method(*args, **kwargs)
            return issue(CollectiveEvent(op, UNREAD, args), method, args, kwargs)

        skip_dynamo(hook.__code__)
        return hook

    return make_hook


def _wrap_forcing(method: Callable[..., Any]) -> Callable[..., Any]:
    def hook(*args: Any, **kwargs: Any) -> Any:
        with force_hook_key():
            return method(*args, **kwargs)

    skip_dynamo(hook.__code__)
    return hook


def _wrap_wait(method: Callable[..., Any]) -> Callable[..., Any]:
    # pybind11 knows by its name that a class derived from Work has not overridden the method.
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(work, *args, **kwargs)
        if REENTRANCY.unfinished:
            report_wait(sys._getframe(1).f_code)
        return result

    skip_dynamo(wait.__code__)
    return wait


def _wrap_observed(op: str, *, reduces: bool) -> Callable[[Any], Callable[..., Any]]:
    layout, name = OPS["c10d"][op], f"c10d.{op}"
    num_tensors = max(layout.inputs or 0, layout.outputs or 0) + 1

    def make_hook(method: Callable[..., Any]) -> Callable[..., Any]:
        call_forcing = _wrap_forcing(method)

        def call(*args: Any) -> Any:
            if not _HAS_ALL:
                return method(*args)
            was_excluded = _is_excluded(_KEY)
            _set_excluded(_KEY, True)
            try:
                return method(*args)
            finally:
                _set_excluded(_KEY, was_excluded)

        def hook(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            _, transforms = OBSERVERS.current
            # A result transform expects the result of the op, not of the method. A call with other
            # arguments than torch's own Python code passes is read by the kernel hook.
            is_usual = not kwargs and len(args) == num_tensors + 1 and _is_plain(args[0])
            if REENTRANCY.depth or transforms or not is_usual:
                return call_forcing(group, *args, **kwargs)
            *tensors, options = args
            reduction = (options.reduceOp,) if reduces else ()
            is_async = getattr(options, "asyncOp", None)
            event = CollectiveEvent(name, layout, (*tensors, group, *reduction), is_async=is_async)
            return issue(event, call, (group, *args), {})

        for function in (call, hook):
            skip_dynamo(function.__code__)
        return hook

    return make_hook


def _is_plain(value: Any) -> bool:
    """Whether it is plain tensors with data, and no dispatch mode is active."""
    first = value[0] if type(value) is list and value else value
    return type(first) in _PLAIN and not first.is_meta and not has_modes()


_installed: ExitStack | None = None
_missing: list[str] = []  # a sentence for each name that the hooks need and this torch lacks
_lock = threading.RLock()


@contextmanager
def intercept(
    observer: Observer, *, report_missing: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Report every collective of this process, on any thread, to `observer` until the context ends.

    If this torch lacks a name that some hooks need, `report_missing` is called with a sentence for
    each, and the other hooks are installed; without `report_missing`, TorchVersionError is raised.
    """
    global _installed
    with _lock:
        if _installed is None:
            _installed = _install()
        OBSERVERS.set((*OBSERVERS.current[0], observer))
    try:
        for sentence in _missing:
            if report_missing is None:
                raise TorchVersionError(sentence)
            report_missing(sentence)
        yield
    finally:
        with _lock:
            OBSERVERS.set(
                tuple(
                    installed_observer
                    for installed_observer in OBSERVERS.current[0]
                    if installed_observer is not observer
                )
            )
            if not OBSERVERS.current[0] and _installed is not None:
                installed, _installed = _installed, None
                installed.close()


def _install() -> ExitStack:
    _missing.clear()
    with ExitStack() as stack:
        for install_hooks in (kernel_hooks, op_hooks, method_hooks):
            try:
                require(*NEEDED_TO_ISSUE, *NEEDED_OF_MODES)
                with moved_names_explained():
                    stack.enter_context(install_hooks())
            except TorchVersionError as error:
                _missing.append(str(error))
        return stack.pop_all()
