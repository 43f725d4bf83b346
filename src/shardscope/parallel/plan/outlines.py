"""Outlines of models and of exported programs."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from shardscope._torch.modules import named_places, own_buffers, own_parameters
from shardscope._torch.pytree_paths import leaf_paths
from shardscope.parallel.placements import Size
from shardscope.parallel.plan.outline import (
    ModuleOutline,
    Outline,
    TensorOutline,
    ValueOutline,
)

__all__ = ["outline_of", "outline_of_program"]

Found = dict[str, tuple[torch.Tensor, bool]]
"""Tensors by name, each with whether it is a parameter."""

_CALL_NUMBER = re.compile(r"@\d+")  # of a module that is called several times


def outline_of(model: nn.Module) -> Outline:
    """The modules and tensors of a model; what it is called with is not known."""
    modules: dict[str, ModuleOutline] = {}
    found: Found = {}
    for place, module in sorted(named_places(model), key=lambda one: one[0].count(".")):
        parameters, buffers = dict(own_parameters(module)), dict(own_buffers(module))
        cls = type(module)
        modules[place] = ModuleOutline(
            _dotted(cls), tuple(parameters), tuple(buffers), tuple(_bases(cls))
        )
        for name, tensor in (*parameters.items(), *buffers.items()):
            found[_join(place, name)] = (tensor, name in parameters)
    return Outline(modules, _outline_tensors(found))


def outline_of_program(program: ExportedProgram) -> Outline:
    """The modules that the program's nodes come from, its tensors, inputs and outputs."""
    found = _program_tensors(program)
    parameters, buffers = _owned(found, is_parameter=True), _owned(found, is_parameter=False)
    types = _module_types(program)
    names = {"", *types, *_with_parents((*parameters, *buffers))}
    modules = {
        name: ModuleOutline(
            types.get(name, ""),
            tuple(parameters.get(name, ())),
            tuple(buffers.get(name, ())),
            _bases_named(types.get(name, "")),
        )
        for name in sorted(names)
    }
    return Outline(modules, _outline_tensors(found), _inputs(program), _outputs(program))


def _outline_tensors(found: Found) -> dict[str, TensorOutline]:
    """One for each tensor, under its first name."""
    names: defaultdict[object, list[str]] = defaultdict(list)
    for name, (tensor, _) in found.items():
        names[_identity(tensor)].append(name)
    return {
        first: TensorOutline(tuple(found[first][0].shape), found[first][1], tuple(aliases))
        for first, *aliases in names.values()
    }


def _identity(tensor: torch.Tensor) -> object:
    """The same for tensors that are one: export and `.data` make new objects of old memory."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # tensors that wrap others have none
        return id(tensor)
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _program_tensors(program: ExportedProgram) -> Found:
    """Those that the graph takes come first, and then their other names, which export drops."""
    signature = program.graph_signature
    known = {**program.constants, **program.state_dict}
    found: Found = {}
    for name in (*signature.parameters, *signature.buffers):
        if isinstance(known.get(name), torch.Tensor):
            found[name] = (known[name], name in signature.parameters)
    for name, tensor in program.state_dict.items():
        found.setdefault(name, (tensor, isinstance(tensor, nn.Parameter)))
    return found


def _owned(found: Found, *, is_parameter: bool) -> dict[str, list[str]]:
    """By module, the names of its own parameters or buffers."""
    owned: defaultdict[str, list[str]] = defaultdict(list)
    for name, (_, is_one) in found.items():
        if is_one is is_parameter:
            module, _, own = name.rpartition(".")
            owned[module].append(own)
    return dict(owned)


def _module_types(program: ExportedProgram) -> dict[str, str]:
    """The class of each module that a node comes from."""
    types: dict[str, str] = {}
    for node in program.graph.nodes:
        for path, cls in (node.meta.get("nn_module_stack") or {}).values():
            name = _CALL_NUMBER.sub("", path)
            types.setdefault(name, cls if isinstance(cls, str) else _dotted(cls))
    return types


def _with_parents(modules: Iterable[str]) -> Iterator[str]:
    for name in modules:
        while name:
            yield name
            name = name.rpartition(".")[0]


def _bases_named(type_name: str) -> tuple[str, ...]:
    """Of a class by its dotted name, if it has been imported anyway."""
    module, _, name = type_name.rpartition(".")
    cls = getattr(sys.modules.get(module), name, None)
    return tuple(_bases(cls)) if isinstance(cls, type) else ()


def _bases(cls: type) -> Iterator[str]:
    for base in cls.__mro__[1:]:
        if base is nn.Module:
            return
        yield _dotted(base)


def _dotted(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _inputs(program: ExportedProgram) -> dict[str, ValueOutline]:
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


def _outputs(program: ExportedProgram) -> dict[str, ValueOutline]:
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


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
