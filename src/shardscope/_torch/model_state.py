"""All that a model's modules hold, to be exchanged for a while and put back as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardscope._torch.modules import every_module

__all__ = ["exchange_tensors", "kept_model"]

_HELD = ("_parameters", "_buffers")
_CONTAINERS = (list, dict, set)


@contextmanager
def kept_model(model: nn.Module) -> Iterator[None]:
    """Put every module of `model` back as it is now, whatever happens to it in between."""
    kept = [(module, _snapshot(module)) for module in every_module(model)]
    try:
        yield
    finally:
        for module, (attributes, containers) in kept:
            for container, content in containers:
                _refill(container, content)
            vars(module).clear()
            vars(module).update(attributes)


def _snapshot(module: nn.Module) -> tuple[dict[str, Any], list[tuple[Any, Any]]]:
    attributes = dict(vars(module))
    containers = [v for v in attributes.values() if isinstance(v, _CONTAINERS)]
    return attributes, [(one, one.copy()) for one in containers]


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)


def exchange_tensors(model: nn.Module, exchange: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Give every module of `model` others for its tensors: parameters, buffers, plain ones."""
    for module in every_module(model):
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                vars(module)[name] = exchange(value)
            elif name in _HELD:
                for key, tensor in value.items():
                    value[key] = None if tensor is None else exchange(tensor)
