"""The module tree as the user built it, under the wrappers that torch puts around modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from shardscope._torch.private import find_class

__all__ = [
    "called_children",
    "every_module",
    "is_compile_wrapper",
    "is_compiled",
    "is_persistent",
    "is_wrapper",
    "named_places",
    "own_buffers",
    "own_parameters",
    "own_parts",
    "parameter_named",
    "unwrap",
    "wrapped_by",
]

OptimizedModule = find_class(
    "torch._dynamo.OptimizedModule", "remove the torch.compile wrapper from module names"
)
ActivationWrapper = find_class(
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper",
    "remove the checkpoint wrapper from module names",
)

_MAX_PLACES = 32

_WRAPPERS: dict[type[nn.Module], str] = {
    OptimizedModule: "_orig_mod",
    ActivationWrapper: "_checkpoint_wrapped_module",
    FullyShardedDataParallel: "_fsdp_wrapped_module",
    DistributedDataParallel: "module",
}


def is_wrapper(module: nn.Module) -> bool:
    """Whether torch put `module` around one of the user's."""
    return isinstance(module, tuple(_WRAPPERS))


def unwrap(module: nn.Module) -> nn.Module:
    """The user's module within the wrappers that torch put around it."""
    while (inner := wrapped_by(module)) is not None:
        module = inner
    return module


def wrapped_by(module: nn.Module) -> nn.Module | None:
    """What `module` was put around by torch, if it is a wrapper."""
    name = _wrapped_name(module)
    return None if name is None else module._modules[name]


def named_places(
    root: nn.Module, prefix: str = "", *, keep_wrappers: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """Every module below `root` with its clean name; a shared one once for each of its places.

    Wrappers add no name: they and what they wrap come under one, unless they are to be kept.
    A module has no place within itself, and at most 32 in all: layers that each hold all layers
    before them have more places than anyone could count.
    """
    num_places: Counter[int] = Counter()
    # A list of what is to come, not recursion: models may be deeper than Python's stack.
    coming: list[tuple[str, nn.Module, frozenset[int]]] = [(prefix, root, frozenset())]
    while coming:
        place, module, holders = coming.pop()
        if id(module) in holders or num_places[id(module)] >= _MAX_PLACES:
            continue
        yield place, module
        num_places[id(module)] += 1
        wrapped = None if keep_wrappers else _wrapped_name(module)
        holders |= {id(module)}
        for name, child in reversed(module._modules.items()):
            if child is not None:
                below = place if name == wrapped else f"{place}.{name}".lstrip(".")
                coming.append((below, child, holders))


def every_module(root: nn.Module) -> Iterator[nn.Module]:
    """Every module below `root` and `root` itself, each once."""
    seen: set[int] = set()
    coming = [root]
    while coming:
        module = coming.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            coming.extend(child for child in module._modules.values() if child is not None)


def called_children(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules that `module` holds itself, or in lists and dicts, which are never called."""
    for name, child in module._modules.items():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from called_children(child, f"{prefix}{name}.")
        elif child is not None:
            yield f"{prefix}{name}", child


def _wrapped_name(module: nn.Module) -> str | None:
    return next((name for cls, name in _WRAPPERS.items() if isinstance(module, cls)), None)


def own_parameters(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters that `module` itself holds, tied ones too."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter


def own_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that `module` itself holds."""
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield name, buffer


def own_parts(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | nn.Module]]:
    """The parameters, buffers and modules that `module` itself holds, in this order."""
    yield from own_parameters(module)
    yield from own_buffers(module)
    yield from ((name, child) for name, child in module._modules.items() if child is not None)


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether a buffer that `module` itself holds is saved with it."""
    return name not in module._non_persistent_buffers_set


def is_compile_wrapper(module: nn.Module) -> bool:
    """Whether `module` is what torch.compile puts around a module."""
    return isinstance(module, OptimizedModule)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile was applied to `module` itself, by wrapping it or in place."""
    return is_compile_wrapper(module) or module._compiled_call_impl is not None


def parameter_named(module: nn.Module, name: str) -> torch.Tensor | None:
    """The parameter that `module` itself holds under `name`."""
    return module._parameters.get(name)
