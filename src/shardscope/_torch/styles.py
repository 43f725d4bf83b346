"""Which tensor-parallel style was applied to a module: torch leaves only its hooks behind."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel.style import ParallelStyle

from shardscope._torch.meshes import axis_names

__all__ = ["parallel_styles"]

_MAX_DEPTH = 4


def parallel_styles(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """The names of the styles whose hooks `module` has, each with the axes it works along."""
    styles: dict[str, tuple[str, ...]] = {}
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        for name in _styles_in(hook, _MAX_DEPTH):
            styles[name] = styles.get(name) or _axes_in(hook)
    return styles


def _axes_in(hook: Any) -> tuple[str, ...]:
    """Of the mesh that a hook's closure holds."""
    meshes = (held for held in _held_by(hook) if isinstance(held, DeviceMesh))
    return next((axis_names(mesh) for mesh in meshes), ())


def _held_by(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue


def _styles_in(value: Any, depth: int) -> Iterator[str]:
    """Styles that a hook's closure holds, or whose methods it calls."""
    if depth == 0:
        return
    if isinstance(value, ParallelStyle):
        yield type(value).__name__
    elif isinstance(value, partial):
        yield from _styles_in(value.func, depth)
    elif isinstance(value, MethodType):
        yield from _styles_in(value.__self__, depth)
    elif isinstance(value, FunctionType):
        name, _, method = value.__qualname__.rpartition(".")
        style = value.__globals__.get(name) if method else None
        if isinstance(style, type) and issubclass(style, ParallelStyle):
            yield name
            return
        for held in _held_by(value):
            yield from _styles_in(held, depth - 1)
