"""The module tree as the user built it, under the wrappers that torch puts around modules."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

__all__ = ["is_wrapper", "named_places", "own_parameters", "unwrap"]

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
    while (name := _wrapped_name(module)) is not None:
        module = module._modules[name]  # type: ignore[assignment]
    return module


def named_places(
    root: nn.Module, prefix: str = "", *, keep_wrappers: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """Every module below `root` with its clean name; a shared one once for each of its places.

    Wrappers add no name: they and what they wrap come under one, unless they are to be kept.
    """
    yield prefix, root
    wrapped = None if keep_wrappers else _wrapped_name(root)
    for name, child in root._modules.items():
        if child is not None:
            place = prefix if name == wrapped else f"{prefix}.{name}".lstrip(".")
            yield from named_places(child, place, keep_wrappers=keep_wrappers)


def _wrapped_name(module: nn.Module) -> str | None:
    return next((name for cls, name in _WRAPPERS.items() if isinstance(module, cls)), None)


def own_parameters(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters that `module` itself holds, tied ones too."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
