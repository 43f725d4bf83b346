"""The user's module tree below torch's wrappers, and the tensors of modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from shardscope._torch.private import find_class

OptimizedModule = find_class(
    "torch._dynamo.OptimizedModule", "remove the torch.compile wrapper from module names"
)
ActivationWrapper = find_class(
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper",
    "remove the checkpoint wrapper from module names",
)

_MAX_PATHS = 32

_WRAPPERS: dict[type[nn.Module], str] = {
    OptimizedModule: "_orig_mod",
    ActivationWrapper: "_checkpoint_wrapped_module",
    FullyShardedDataParallel: "_fsdp_wrapped_module",
    DistributedDataParallel: "module",
}


def is_wrapper(module: nn.Module) -> bool:
    """Whether `module` is a wrapper of torch around a module of the user."""
    return isinstance(module, tuple(_WRAPPERS))


def unwrap(module: nn.Module) -> nn.Module:
    """The user's module inside torch's wrappers."""
    while (wrapped := wrapped_by(module)) is not None:
        module = wrapped
    return module


def wrapped_by(module: nn.Module) -> nn.Module | None:
    """The module that `module` wraps, or None if it is not a wrapper."""
    name = _wrapped_name(module)
    return None if name is None else module._modules[name]


def named_modules_with_aliases(
    root: nn.Module, prefix: str = "", *, keep_wrappers: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """Every module below `root` with its module name; a shared module once for each of its names.

    Wrappers add no name: they and the wrapped module have the same, unless `keep_wrappers`. A
    module has no name below itself, and at most 32 names: layers that each contain all layers
    before them have exponentially many.
    """
    num_paths: Counter[int] = Counter()
    # A stack, not recursion: models may be deeper than Python's recursion limit.
    pending: list[tuple[str, nn.Module, frozenset[int]]] = [(prefix, root, frozenset())]
    while pending:
        path, module, ancestors = pending.pop()
        if id(module) in ancestors or num_paths[id(module)] >= _MAX_PATHS:
            continue
        yield path, module
        num_paths[id(module)] += 1
        wrapped = None if keep_wrappers else _wrapped_name(module)
        ancestors |= {id(module)}
        for name, child in reversed(module._modules.items()):
            if child is not None:
                below = path if name == wrapped else f"{path}.{name}".lstrip(".")
                pending.append((below, child, ancestors))


def every_module(root: nn.Module) -> Iterator[nn.Module]:
    """Every module below `root` and `root` itself, each once."""
    seen: set[int] = set()
    pending = [root]
    while pending:
        module = pending.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            pending.extend(child for child in module._modules.values() if child is not None)


def callable_children(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children of `module`; of a ModuleList or ModuleDict, never called, its children."""
    for name, child in module._modules.items():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from callable_children(child, f"{prefix}{name}.")
        elif child is not None:
            yield f"{prefix}{name}", child


def _wrapped_name(module: nn.Module) -> str | None:
    return next((name for cls, name in _WRAPPERS.items() if isinstance(module, cls)), None)


def own_parameters(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of `module` itself, not of its children; tied ones too."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter


def own_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers of `module` itself, not of its children."""
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield name, buffer


def own_parts(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | nn.Module]]:
    """The parameters, buffers and children of `module` itself, in this order."""
    yield from own_parameters(module)
    yield from own_buffers(module)
    yield from ((name, child) for name, child in module._modules.items() if child is not None)


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether a buffer of `module` itself is part of its state dict."""
    return name not in module._non_persistent_buffers_set


def is_compile_wrapper(module: nn.Module) -> bool:
    """Whether `module` is the wrapper that torch.compile puts around a module."""
    return isinstance(module, OptimizedModule)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile was applied to `module` itself, by wrapping it or in place."""
    return is_compile_wrapper(module) or module._compiled_call_impl is not None


def parameter_named(module: nn.Module, name: str) -> torch.Tensor | None:
    """The parameter of `module` itself with this name, or None."""
    return module._parameters.get(name)


StateLocation = tuple[dict[str, Any], str]
"""Where a tensor is registered: a module's dict of parameters or of buffers, and the key in it."""


def register_tensor(
    root: nn.Module, name: str, tensor: torch.Tensor, *, is_saved: bool
) -> StateLocation:
    """Register a tensor under its dotted name; missing modules on the path are created.

    A child may have the name of a method of `root`: attribute access finds the method, and
    iterating over modules finds the child.
    """
    *path, last = name.split(".")
    for part in path:
        root = root._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
    if isinstance(tensor, nn.Parameter):
        root._parameters[last] = tensor
        return root._parameters, last
    root._buffers[last] = tensor
    if not is_saved:
        root._non_persistent_buffers_set.add(last)
    return root._buffers, last


_TENSOR_TABLES = ("_parameters", "_buffers")
_CONTAINERS = (list, dict, set)


@contextmanager
def preserved_model(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of every module of `model` when the context ends."""
    snapshots = [(module, _snapshot(module)) for module in every_module(model)]
    try:
        yield
    finally:
        for module, (attributes, containers) in snapshots:
            for container, content in containers:
                _refill(container, content)
            vars(module).clear()
            vars(module).update(attributes)


@contextmanager
def preserved_numbers(model: nn.Module) -> Iterator[None]:
    """Restore the numbers among the attributes of modules, such as counters, when it ends."""
    snapshots = [(module, _numbers_of(module)) for module in every_module(model)]
    try:
        yield
    finally:
        for module, numbers in snapshots:
            for name in _numbers_of(module).keys() - numbers.keys():
                del vars(module)[name]
            vars(module).update(numbers)


def _numbers_of(module: nn.Module) -> dict[str, int | float]:
    return {name: value for name, value in vars(module).items() if isinstance(value, int | float)}


def _snapshot(module: nn.Module) -> tuple[dict[str, Any], list[tuple[Any, Any]]]:
    attributes = dict(vars(module))
    containers = [value for value in attributes.values() if isinstance(value, _CONTAINERS)]
    return attributes, [(container, container.copy()) for container in containers]


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)


def exchange_tensors(model: nn.Module, exchange: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every tensor of `model` (parameter, buffer or attribute) by `exchange(tensor)`."""
    for module in every_module(model):
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                vars(module)[name] = exchange(value)
            elif name in _TENSOR_TABLES:
                for key, tensor in value.items():
                    value[key] = None if tensor is None else exchange(tensor)
