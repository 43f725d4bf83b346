"""Backends of torch.compile, by the names that it knows them under."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._dynamo import lookup_backend

__all__ = ["look_up_backend"]


def look_up_backend(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function behind a name; a function is its own."""
    found: Callable[..., Any] = lookup_backend(backend)
    return found
