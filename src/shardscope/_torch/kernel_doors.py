"""Doors on the way to the kernels of `c10d::*`, which every collective takes.

A kernel of ours, written in Python, costs a collective some 40 µs: torch turns all arguments into
Python objects and back, twice. What another door has shown goes past it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.library import Library

from shardscope._torch.calls import OPS, UNREAD, OpLayout, unread_ops
from shardscope._torch.dispatch import has_fakes, is_up_to_a_mode
from shardscope._torch.issuing import INSIDE, Issued, is_tracing, issue
from shardscope._torch.private import find_name, is_missing, require
from shardscope._torch.uncompiled import keep_uncompiled

__all__ = ["go_past", "kernel_doors", "lead_by"]

_NEED = "intercept collectives before their kernels run"

_PYTHON = find_name("torch._C.DispatchKey.Python", _NEED)
_META = find_name("torch._C.DispatchKey.Meta", _NEED)

# Nearly every call comes by this key, and collectives lose nothing where it is left out: they
# mark no views and count no versions. (BackendSelect, which all calls do come by, cannot be left
# out: whatever makes a tensor needs it.)
_KEY = find_name("torch._C.DispatchKey.ADInplaceOrView", _NEED)
_make_keys = find_name("torch._C.DispatchKeySet", _NEED)
_keys_after = find_name("torch._C._dispatch_keyset_full_after", _NEED)
_is_left_out = find_name("torch._C._dispatch_tls_is_dispatch_key_excluded", _NEED)
_is_put_in = find_name("torch._C._dispatch_tls_is_dispatch_key_included", _NEED)
_keys_put_in = find_name("torch._C._dispatch_tls_local_include_set", _NEED)
_keys_left_out = find_name("torch._C._dispatch_tls_local_exclude_set", _NEED)
_exclude = find_name("torch._C._ExcludeDispatchKeyGuard", _NEED)
_force = find_name("torch._C._ForceDispatchKeyGuard", _NEED)
_NEEDED = (
    _PYTHON,
    _META,
    _KEY,
    _make_keys,
    _keys_after,
    _is_left_out,
    _is_put_in,
    _keys_put_in,
    _keys_left_out,
    _exclude,
    _force,
)
_HAS_ALL = not any(map(is_missing, _NEEDED))
_KEYS, _REST = (_make_keys(_KEY), _keys_after(_KEY)) if _HAS_ALL else (None, None)


def go_past() -> Any:
    """A context in which collectives of this thread go past the door."""
    return _exclude(_KEYS) if _HAS_ALL else nullcontext()


@contextmanager
def lead_by() -> Iterator[None]:
    """Have collectives of this thread come by the door, which some would not do by themselves.

    In inference mode its tensors go past it, and so does all that a mode or tensor subclass does.
    """
    if not _HAS_ALL or (_is_put_in(_KEY) and not _is_left_out(_KEY)):
        yield
        return
    put_in = _keys_put_in() | _KEYS
    left_out = _keys_left_out() - _KEYS
    before, INSIDE.is_led = INSIDE.is_led, True
    try:
        with _force(put_in, left_out):
            yield
    finally:
        INSIDE.is_led = before


@contextmanager
def kernel_doors() -> Iterator[None]:
    """Show every collective that comes to a kernel of c10d's and was not shown before."""
    require(*_NEEDED)
    library = Library("c10d", "IMPL")
    destroy = library._destroy
    try:
        for name, layout in (*OPS["c10d"].items(), *((op, UNREAD) for op in unread_ops("c10d"))):
            packet = getattr(torch.ops.c10d, name, None)
            if packet is not None:
                door = _make_door(f"c10d.{name}", layout, packet.default)
                library.impl(name, door, _KEY.name, with_keyset=True)
        yield
    finally:
        destroy()


def _make_door(op: str, layout: OpLayout, overload: Any) -> Callable[..., Any]:
    # Not a kernel's call_boxed: it keeps the GIL, which a thread of gloo's may wait for meanwhile.
    redispatch = overload.redispatch

    def call(keyset: Any, *args: Any) -> Any:
        # Who was led here against torch's will goes on as if not.
        with go_past() if INSIDE.is_led else nullcontext():
            return redispatch(keyset & _REST, *args)

    def door(keyset: Any, *args: Any) -> Any:
        if INSIDE.depth or _is_not_issued(keyset, args):
            return call(keyset, *args)
        return issue(Issued(op, layout, args), call, (keyset, *args), {})

    for function in (call, door):
        keep_uncompiled(function.__code__)
    return door


def _is_not_issued(keyset: Any, args: tuple[Any, ...]) -> bool:
    """Whether the call is torch's writing a graph, or a mode's or subclass's, which comes again."""
    is_handled = keyset.has(_PYTHON)
    if is_handled and (is_up_to_a_mode() or not has_fakes(args)):
        return True
    return bool((is_handled or keyset.has(_META)) and is_tracing())
