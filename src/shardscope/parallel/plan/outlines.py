"""Outlines of models and of exported programs."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.nn.parameter import is_lazy

from shardscope._torch.modules import named_places, own_buffers, own_parameters
from shardscope.errors import PlanError
from shardscope.parallel.plan.outline import ModuleOutline, Outline, TensorOutline
from shardscope.parallel.plan.program_values import program_inputs, program_outputs

__all__ = ["outline_of", "outline_of_program"]

_WORKS = {
    "embedding": "torch.nn.modules.sparse.Embedding",
    "linear": "torch.nn.modules.linear.Linear",
    **{f"conv{n}d": f"torch.nn.modules.conv.Conv{n}d" for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": f"torch.nn.modules.conv.ConvTranspose{n}d" for n in (1, 2, 3)},
}

Found = dict[str, tuple[torch.Tensor, bool]]
"""Tensors by name, each with whether it is a parameter."""

_CALL_NUMBER = re.compile(r"@\d+")  # of a module that is called several times


def outline_of(model: nn.Module) -> Outline:
    """The modules and tensors of a model; what it is called with is not known."""
    modules: dict[str, ModuleOutline] = {}
    found: Found = {}
    for place, module in named_places(model):
        parameters, buffers = dict(own_parameters(module)), dict(own_buffers(module))
        cls = type(module)
        modules[place] = ModuleOutline(
            _dotted(cls), tuple(parameters), tuple(buffers), tuple(_bases(cls))
        )
        for name, tensor in (*parameters.items(), *buffers.items()):
            _check_made(tensor, _join(place, name))
            found[_join(place, name)] = (tensor, name in parameters)
    return Outline(modules, _outline_tensors(found))


def outline_of_program(program: ExportedProgram) -> Outline:
    """The modules that the program's nodes come from, its tensors, inputs and outputs."""
    found = _program_tensors(program)
    parameters, buffers = _owned(found, is_parameter=True), _owned(found, is_parameter=False)
    types, works = _module_types(program), _module_works(program)
    listed = (call.fqn for call in program.module_call_graph)  # also those that are never called
    names = {"", *types, *_with_parents((*listed, *parameters, *buffers))}
    modules = {
        name: ModuleOutline(
            types.get(name, ""),
            tuple(parameters.get(name, ())),
            tuple(buffers.get(name, ())),
            _bases_named(types.get(name, "")) or works.get(name, ()),
        )
        for name in sorted(names)
    }
    return Outline(
        modules, _outline_tensors(found), program_inputs(program), program_outputs(program)
    )


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
        for name, type_name in _stack(node):
            types.setdefault(name, type_name)
    return types


def _stack(node: fx.Node) -> Iterator[tuple[str, str]]:
    """The modules that the node was traced in, from the root inwards, with their classes."""
    for path, cls in (node.meta.get("nn_module_stack") or {}).values():
        yield _CALL_NUMBER.sub("", path), cls if isinstance(cls, str) else _dotted(cls)


def _module_works(program: ExportedProgram) -> dict[str, tuple[str, ...]]:
    """The class of torch's that does what a module does itself, by the op that it calls.

    For classes that cannot be looked up: those made within a function, or not imported here.
    """
    works: dict[str, tuple[str, ...]] = {}
    for node in program.graph.nodes:
        op = str(node.target).partition("aten.")[2].partition(".")[0]
        if op in _WORKS:
            *_, (name, type_name) = ("", ""), *_stack(node)
            if not type_name.startswith("torch."):
                works.setdefault(name, (_WORKS[op],))
    return works


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


def _check_made(tensor: torch.Tensor, name: str) -> None:
    if is_lazy(tensor):
        raise PlanError(
            f"{name!r} has no shape yet: its module is lazy. Call the model once before planning."
        )


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
