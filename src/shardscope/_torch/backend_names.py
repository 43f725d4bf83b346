"""Backends of torch.compile, by the names that it knows them under, and what it tells of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardscope._torch.private import find_name

__all__ = ["compile_and_keep_guards", "describe_compile_times", "look_up_backend"]

_lookup_backend = find_name("torch._dynamo.lookup_backend", "find backends by name")
_optimize = find_name("torch._dynamo.optimize", "return the guards of compiled functions")
_compile_times = find_name("torch._dynamo.utils.compile_times", "print compile times")


def look_up_backend(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function behind a name; a function is its own."""
    found: Callable[..., Any] = _lookup_backend(backend)
    return found


def compile_and_keep_guards(
    function: Callable[..., Any], backend: Callable[..., Any], guards: list[Any]
) -> Callable[..., Any]:
    """A function compiled; when it is called, what it is compiled for is added to `guards`."""
    compiled: Callable[..., Any] = _optimize(backend, guard_export_fn=guards.extend)(function)
    return compiled


def describe_compile_times() -> str:
    """What torch says of how long it took to compile since it was last reset."""
    return str(_compile_times(repr="str"))
