"""The tensors that a function holds: parameters, buffers, and what its closure keeps."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

__all__ = ["find_modules", "find_tensors"]

_DEPTH = 6  # of containers and closures that are looked into


def find_tensors(value: Any) -> dict[str, Tensor]:
    """Tensors that a function or value holds, each under the name of the first way to it."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, one in _walk("", value, _DEPTH, set()):
        if isinstance(one, nn.Module):
            for inner, tensor in (*one.named_parameters(), *one.named_buffers()):
                found.setdefault(id(tensor), (_join(name, inner), tensor))
        elif isinstance(one, Tensor):
            found.setdefault(id(one), (name, one))
    return dict(found.values())


def find_modules(value: Any) -> list[nn.Module]:
    """Modules that a function or value holds, without those within others."""
    return [one for _, one in _walk("", value, _DEPTH, set()) if isinstance(one, nn.Module)]


def _walk(name: str, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(value) in seen or depth < 0:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module | Tensor):
        yield name, value
        return
    for part, one in _parts(value):
        yield from _walk(_join(name, part), one, depth - 1, seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, MethodType):
        yield "", value.__self__
        yield "", value.__func__
    elif isinstance(value, functools.partial):
        yield "", value.func
        yield from ((str(index), one) for index, one in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, FunctionType):
        yield from _function_parts(value)
    elif isinstance(value, dict):
        yield from ((str(key), one) for key, one in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(index), one) for index, one in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from vars(value).items()


def _function_parts(function: FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    for name in code.co_names:
        held = function.__globals__.get(name)
        if isinstance(held, nn.Module | Tensor | list | dict | tuple | FunctionType):
            yield name, held
    yield from ((str(i), one) for i, one in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
