"""Objects of the user's, as they were before a step and are again after it."""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import FunctionType, MethodType, ModuleType
from typing import Any, final

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardscope._torch.fakes import FakeTensor
from shardscope._torch.modules import every_module, own_parameters

__all__ = ["Kept", "find_changeable", "find_leftovers"]

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
            self.keep_gradients(parameter for _, parameter in own_parameters(module))
        if isinstance(holder, Optimizer):
            groups = holder.param_groups
            self.keep_gradients(one for group in groups for one in group["params"])
        self._keep(vars(holder), 0)

    def keep_container(self, container: object) -> None:
        """Remember what a list, dict or set holds, and what those in it do."""
        self._keep(container, 0)

    def keep_gradients(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remember which gradients tensors have, if they may have one."""
        for tensor in tensors:
            if tensor.is_leaf:
                # One without data is the step's: to keep it would be to hold its memory.
                gradient = None if isinstance(tensor.grad, FakeTensor) else tensor.grad
                self._gradients.setdefault(id(tensor), (tensor, gradient))

    def put_back(self) -> None:
        """Make everything as it was remembered."""
        for container, held in self._containers.values():
            _fill(container, held)
        for tensor, gradient in self._gradients.values():
            if tensor.is_leaf and tensor.grad is not gradient:  # one written to in place is none
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


def find_changeable(step: Callable[[], object]) -> Iterator[Any]:
    """The models, optimizers, schedulers and scalers that a step's functions name."""
    return (value for _, value in _walk(step) if isinstance(value, _CHANGEABLE))


def find_leftovers(step: Callable[[], object]) -> Iterator[str]:
    """The names in a step's functions of other objects that hold tensors without data."""
    for name, value in _walk(step):
        if not isinstance(value, _CHANGEABLE) and _holds_fakes(value, 0):
            yield name


def _walk(step: Callable[[], object]) -> Iterator[tuple[str, Any]]:
    """What a step's functions name, each object once."""
    seen: set[int] = set()
    coming: list[tuple[str, Any]] = [("step", step)]
    while coming:
        name, one = coming.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield name, one
        if isinstance(one, MethodType):
            coming.append((name, one.__func__))
            coming.extend(getattr(one.__self__, "__dict__", {}).items())
        elif isinstance(one, functools.partial):
            coming.extend((name, value) for value in (one.func, *one.args, *one.keywords.values()))
        elif isinstance(one, FunctionType) and not _is_torchs(one):
            coming.extend(_named_in(one))


def _named_in(function: FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # nothing has been put there yet
            yield name, cell.cell_contents
    for name in code.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for value in function.__defaults__ or ():
        yield function.__name__, value


def _holds_fakes(value: Any, depth: int) -> bool:
    if isinstance(value, FakeTensor):
        return True
    if isinstance(value, _CHANGEABLE) or depth == _MAX_DEPTH:
        return False
    if isinstance(value, dict):
        held: Iterable[Any] = list(value.values())
    elif isinstance(value, list | tuple | set):
        held = list(value)
    elif isinstance(value, type | ModuleType | FunctionType | MethodType | torch.Tensor):
        return False
    else:
        held = list(getattr(value, "__dict__", {}).values())
    return any(_holds_fakes(one, depth + 1) for one in held)


def _is_torchs(function: FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] in ("torch", "shardscope")


def _fill(container: Any, held: Any) -> None:
    if isinstance(container, list):
        container[:] = held
    else:
        container.clear()
        container.update(held)
