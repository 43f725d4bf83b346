"""The modules, tensors, inputs and outputs of a program, by the names that plans use."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.nn.parameter import is_lazy

from shardscope._torch.modules import named_modules_with_aliases, own_buffers, own_parameters
from shardscope._torch.tree import leaf_paths
from shardscope.errors import PlanError
from shardscope.plan.placements import Size
from shardscope.plan.styles import class_names


@final
@dataclass(frozen=True)
class ModuleInfo:
    """A module: its class, and the names of its own parameters and buffers."""

    type_name: str = ""  # dotted; "" if unknown
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()  # dotted names of its base classes, if known


@final
@dataclass(frozen=True)
class TensorInfo:
    """A parameter or buffer; a tied tensor is indexed under its first name."""

    shape: tuple[Size, ...]
    is_parameter: bool = True
    aliases: tuple[str, ...] = ()  # its other names


@final
@dataclass(frozen=True)
class ValueInfo:
    """An input or output of the program; `shape` is None if it is not a tensor."""

    shape: tuple[Size, ...] | None = None
    alias: str = ""  # its node's name in the program's graph


@final
@dataclass(frozen=True)
class ProgramIndex:
    """What plans refer to. `inputs` and `outputs` are by path, in order; None: unknown.

    The path of a value nested in an argument is that argument's name and the keys that lead to
    it: `batch.ids`. Outputs have no name of their own, so theirs begins with a position or a key.
    """

    modules: Mapping[str, ModuleInfo]
    tensors: Mapping[str, TensorInfo]
    inputs: Mapping[str, ValueInfo] | None = None
    outputs: Mapping[str, ValueInfo] | None = None

    @cached_property
    def primary_names(self) -> dict[str, str]:
        """By every name of every tensor, the name that it is indexed under."""
        names = {name: name for name in self.tensors}
        for name, tensor in self.tensors.items():
            names.update(dict.fromkeys(tensor.aliases, name))
        return names

    def tensor(self, name: str) -> TensorInfo:
        """The tensor with this name, which may be an alias."""
        return self.tensors[self.primary_names[name]]

    def without_prefix(self, prefix: str) -> ProgramIndex:
        """The index with `prefix` removed from names; wrappers of the same name are dropped."""
        inside = {_strip_prefix(name, prefix) for name in self.modules if _has_prefix(name, prefix)}
        modules = {
            _strip_prefix(name, prefix): module
            for name, module in self.modules.items()
            if _has_prefix(name, prefix) or name not in inside
        }
        tensors = {
            _strip_prefix(name, prefix): replace(
                tensor, aliases=tuple(_strip_prefix(alias, prefix) for alias in tensor.aliases)
            )
            for name, tensor in self.tensors.items()
        }
        return replace(self, modules=modules, tensors=tensors)


def _has_prefix(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _strip_prefix(name: str, prefix: str) -> str:
    return name[len(prefix) + 1 :] if _has_prefix(name, prefix) else name


def program_inputs(program: ExportedProgram) -> dict[str, ValueInfo]:
    """The program's inputs, by path."""
    signature = program.module_call_graph[0].signature
    names = program.graph_signature.user_inputs
    paths = None if signature is None else leaf_paths(signature.in_spec)
    arguments = getattr(signature, "forward_arg_names", None) or []
    values = _values(program)
    if paths is None or len(paths) != len(names):
        return {str(name): _index_value(name, values) for name in names}
    return {
        _input_path(path, arguments, str(name)): _index_value(name, values)
        for path, name in zip(paths, names, strict=True)
    }


def _input_path(path: tuple[str, ...], arguments: list[str], name: str) -> str:
    """The path of a leaf of (args, kwargs), beginning with its argument's name."""
    side, first, *rest = path
    if side == "1":
        return ".".join((first, *rest))
    if int(first) < len(arguments):
        return ".".join((arguments[int(first)], *rest))
    return name


def program_outputs(program: ExportedProgram) -> dict[str, ValueInfo]:
    """The program's outputs, by path."""
    signature = program.module_call_graph[0].signature
    names = program.graph_signature.user_outputs
    paths = None if signature is None else leaf_paths(signature.out_spec)
    values = _values(program)
    if paths is None or len(paths) != len(names):
        return {str(position): _index_value(name, values) for position, name in enumerate(names)}
    return {
        ".".join(path) or "0": _index_value(name, values)
        for path, name in zip(paths, names, strict=True)
    }


def _values(program: ExportedProgram) -> dict[str, object]:
    return {node.name: node.meta.get("val") for node in program.graph.nodes}


def _index_value(name: object, values: Mapping[str, object]) -> ValueInfo:
    value = values.get(name) if isinstance(name, str) else None
    alias = name if isinstance(name, str) else ""
    if not isinstance(value, torch.Tensor):
        return ValueInfo(None, alias)
    return ValueInfo(tuple(map(_size, value.shape)), alias)


def _size(size: int | torch.SymInt) -> Size:
    """An int, or the expression of a dynamic size."""
    return size.node.expr if isinstance(size, torch.SymInt) else int(size)


_OP_CLASSES = {
    "embedding": "torch.nn.modules.sparse.Embedding",
    "linear": "torch.nn.modules.linear.Linear",
    **{f"conv{n}d": f"torch.nn.modules.conv.Conv{n}d" for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": f"torch.nn.modules.conv.ConvTranspose{n}d" for n in (1, 2, 3)},
}

NamedTensors = dict[str, tuple[torch.Tensor, bool]]
"""Tensors by name, each with whether it is a parameter."""

_CALL_NUMBER = re.compile(r"@\d+")  # of a module that is called several times


def index_model(model: nn.Module) -> ProgramIndex:
    """The modules and tensors of a model; its inputs and outputs are unknown."""
    modules: dict[str, ModuleInfo] = {}
    tensors: NamedTensors = {}
    for module_name, module in named_modules_with_aliases(model):
        parameters, buffers = dict(own_parameters(module)), dict(own_buffers(module))
        type_name, *bases = class_names(type(module))
        modules[module_name] = ModuleInfo(
            type_name, tuple(parameters), tuple(buffers), tuple(bases)
        )
        for name, tensor in (*parameters.items(), *buffers.items()):
            _check_initialized(tensor, _join(module_name, name))
            tensors[_join(module_name, name)] = (tensor, name in parameters)
    return ProgramIndex(modules, _index_tensors(tensors))


def index_program(program: ExportedProgram) -> ProgramIndex:
    """The modules that the program's nodes come from, its tensors, inputs and outputs."""
    tensors = _program_tensors(program)
    parameters, buffers = (
        _own_tensors(tensors, is_parameter=True),
        _own_tensors(tensors, is_parameter=False),
    )
    types, op_classes = _module_types(program), _module_op_classes(program)
    called = (call.fqn for call in program.module_call_graph)  # also modules that are never called
    names = {"", *types, *_with_parents((*called, *parameters, *buffers))}
    modules = {
        name: ModuleInfo(
            types.get(name, ""),
            tuple(parameters.get(name, ())),
            tuple(buffers.get(name, ())),
            _bases_by_name(types.get(name, "")) or op_classes.get(name, ()),
        )
        for name in sorted(names)
    }
    return ProgramIndex(
        modules, _index_tensors(tensors), program_inputs(program), program_outputs(program)
    )


def _index_tensors(tensors: NamedTensors) -> dict[str, TensorInfo]:
    """Tensors by their first names, with their aliases."""
    names: defaultdict[object, list[str]] = defaultdict(list)
    for name, (tensor, _) in tensors.items():
        names[_identity(tensor)].append(name)
    return {
        first: TensorInfo(tuple(tensors[first][0].shape), tensors[first][1], tuple(aliases))
        for first, *aliases in names.values()
    }


def _identity(tensor: torch.Tensor) -> object:
    """A key that is equal for tied tensors: torch.export and `.data` make new tensor objects."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # tensor subclasses may have no storage
        return id(tensor)
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _program_tensors(program: ExportedProgram) -> NamedTensors:
    """Inputs of the graph first, then their aliases, which torch.export drops from the graph."""
    signature = program.graph_signature
    known = {**program.constants, **program.state_dict}
    tensors: NamedTensors = {}
    for name in (*signature.parameters, *signature.buffers):
        if isinstance(known.get(name), torch.Tensor):
            tensors[name] = (known[name], name in signature.parameters)
    for name, tensor in program.state_dict.items():
        tensors.setdefault(name, (tensor, isinstance(tensor, nn.Parameter)))
    return tensors


def _own_tensors(tensors: NamedTensors, *, is_parameter: bool) -> dict[str, list[str]]:
    """By module, the names of its own parameters or buffers."""
    owned: defaultdict[str, list[str]] = defaultdict(list)
    for name, (_, is_param) in tensors.items():
        if is_param is is_parameter:
            module, _, tensor_name = name.rpartition(".")
            owned[module].append(tensor_name)
    return dict(owned)


def _module_types(program: ExportedProgram) -> dict[str, str]:
    """The class of each module that a node comes from."""
    types: dict[str, str] = {}
    for node in program.graph.nodes:
        for name, type_name in _stack(node):
            types.setdefault(name, type_name)
    return types


def _stack(node: fx.Node) -> Iterator[tuple[str, str]]:
    """The modules that the node was traced in, from the root inwards, with their classes."""
    for path, cls in (node.meta.get("nn_module_stack") or {}).values():
        yield _CALL_NUMBER.sub("", path), cls if isinstance(cls, str) else class_names(cls)[0]


def _module_op_classes(program: ExportedProgram) -> dict[str, tuple[str, ...]]:
    """By module, the torch class that computes the op which the module calls itself.

    For classes that cannot be looked up: those defined in a function, or not imported here.
    """
    op_classes: dict[str, tuple[str, ...]] = {}
    for node in program.graph.nodes:
        op = str(node.target).partition("aten.")[2].partition(".")[0]
        if op in _OP_CLASSES:
            *_, (name, type_name) = ("", ""), *_stack(node)
            if not type_name.startswith("torch."):
                op_classes.setdefault(name, (_OP_CLASSES[op],))
    return op_classes


def _with_parents(modules: Iterable[str]) -> Iterator[str]:
    for name in modules:
        while name:
            yield name
            name = name.rpartition(".")[0]


def _bases_by_name(type_name: str) -> tuple[str, ...]:
    """The bases of a class by its dotted name; () if it is not imported."""
    module, _, name = type_name.rpartition(".")
    cls = getattr(sys.modules.get(module), name, None)
    return class_names(cls)[1:] if isinstance(cls, type) else ()


def _check_initialized(tensor: torch.Tensor, name: str) -> None:
    if is_lazy(tensor):
        raise PlanError(
            f"{name!r} has no shape yet: its module is lazy. Call the model once before planning."
        )


def _join(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
