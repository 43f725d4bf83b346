"""Objects of the user's, as they were before a step and are again after it."""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any, final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardscope._torch.modules import every_module, own_parameters

__all__ = ["Kept", "find_changeable"]

_MAX_DEPTH = 3  # an optimizer's groups are dicts in a list, with lists of parameters in them
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)
_CHANGEABLE = (nn.Module, Optimizer, LRScheduler, GradScaler)


@final
class Kept:
    """Remembers what objects held, and puts it back: attributes, lists and dicts in them."""

    def __init__(self) -> None:
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def keep(self, holder: object) -> None:
        """Remember the attributes of a model, an optimizer or something like it."""
        modules = every_module(holder) if isinstance(holder, nn.Module) else ()
        for module in modules:
            self._keep(vars(module), 0)
            self._keep_gradients(parameter for _, parameter in own_parameters(module))
        if isinstance(holder, Optimizer):
            groups = holder.param_groups
            self._keep_gradients(one for group in groups for one in group["params"])
        self._keep(vars(holder), 0)

    def put_back(self) -> None:
        """Make everything as it was remembered."""
        for container, held in self._containers.values():
            _fill(container, held)
        for tensor, gradient in self._gradients.values():
            if tensor.grad is not gradient:
                tensor.grad = gradient
        self._containers.clear()
        self._gradients.clear()

    def _keep(self, container: Any, depth: int) -> None:
        if type(container) not in _CONTAINERS or id(container) in self._containers:
            return
        self._containers[id(container)] = (container, container.copy())
        if depth < _MAX_DEPTH:
            held = container.values() if isinstance(container, dict) else container
            for value in held:
                self._keep(value, depth + 1)

    def _keep_gradients(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.is_leaf:
                # One without data is the step's: to keep it would be to hold its memory.
                gradient = None if isinstance(tensor.grad, FakeTensor) else tensor.grad
                self._gradients.setdefault(id(tensor), (tensor, gradient))


def find_changeable(step: Callable[[], object]) -> Iterator[Any]:
    """The models, optimizers, schedulers and scalers that a step's functions name."""
    seen: set[int] = set()
    coming: list[Any] = [step]
    while coming:
        one = coming.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, _CHANGEABLE):
            yield one
        elif isinstance(one, MethodType):
            coming.extend((one.__func__, *_attributes(one.__self__)))
        elif isinstance(one, FunctionType) and not _is_torchs(one):
            coming.extend(_named_in(one))


def _attributes(holder: Any) -> list[Any]:
    return list(getattr(holder, "__dict__", {}).values())


def _named_in(function: FunctionType) -> Iterator[Any]:
    names = inspect.getclosurevars(function)
    yield from names.nonlocals.values()
    yield from names.globals.values()
    yield from function.__defaults__ or ()


def _is_torchs(function: FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] in ("torch", "shardscope")


def _fill(container: Any, held: Any) -> None:
    if isinstance(container, list):
        container[:] = held
    else:
        container.clear()
        container.update(held)
