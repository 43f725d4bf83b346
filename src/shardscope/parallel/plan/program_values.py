"""What an exported program takes and returns, by the path of each value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram

from shardscope._torch.pytree_paths import leaf_paths
from shardscope.parallel.placements import Size
from shardscope.parallel.plan.outline import ValueOutline

__all__ = ["program_inputs", "program_outputs"]


def program_inputs(program: ExportedProgram) -> dict[str, ValueOutline]:
    """By path, what the program is called with."""
    signature = program.module_call_graph[0].signature
    names = program.graph_signature.user_inputs
    paths = None if signature is None else leaf_paths(signature.in_spec)
    arguments = getattr(signature, "forward_arg_names", None) or []
    values = _values(program)
    if paths is None or len(paths) != len(names):
        return {str(name): _outline_value(name, values) for name in names}
    return {
        _input_path(path, arguments, str(name)): _outline_value(name, values)
        for path, name in zip(paths, names, strict=True)
    }


def _input_path(path: tuple[str, ...], arguments: list[str], name: str) -> str:
    """Of a leaf of (args, kwargs), by its argument's name."""
    side, first, *rest = path
    if side == "1":
        return ".".join((first, *rest))
    if int(first) < len(arguments):
        return ".".join((arguments[int(first)], *rest))
    return name


def program_outputs(program: ExportedProgram) -> dict[str, ValueOutline]:
    """By path, what the program returns."""
    signature = program.module_call_graph[0].signature
    names = program.graph_signature.user_outputs
    paths = None if signature is None else leaf_paths(signature.out_spec)
    values = _values(program)
    if paths is None or len(paths) != len(names):
        return {str(at): _outline_value(name, values) for at, name in enumerate(names)}
    return {
        ".".join(path) or "0": _outline_value(name, values)
        for path, name in zip(paths, names, strict=True)
    }


def _values(program: ExportedProgram) -> dict[str, Any]:
    return {node.name: node.meta.get("val") for node in program.graph.nodes}


def _outline_value(name: Any, values: Mapping[str, Any]) -> ValueOutline:
    value = values.get(name) if isinstance(name, str) else None
    alias = name if isinstance(name, str) else ""
    if not isinstance(value, torch.Tensor):
        return ValueOutline(None, alias)
    return ValueOutline(tuple(map(_size, value.shape)), alias)


def _size(size: Any) -> Size:
    """A number, or the expression of a size that a dynamic program leaves open."""
    return size.node.expr if isinstance(size, torch.SymInt) else int(size)
