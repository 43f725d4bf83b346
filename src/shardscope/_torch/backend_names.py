"""Backends of torch.compile, by the names that it knows them under."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardscope._torch.private import find_name

__all__ = ["look_up_backend"]

_lookup_backend = find_name("torch._dynamo.lookup_backend", "find backends by name")


def look_up_backend(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function behind a name; a function is its own."""
    found: Callable[..., Any] = _lookup_backend(backend)
    return found
