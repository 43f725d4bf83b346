"""Snapshots of the user's objects, tensors and random number generators, restored after a step."""

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

from shardscope._torch.fake import FakeTensor
from shardscope._torch.modules import every_module, own_parameters
from shardscope._torch.private import find_name

_MAX_DEPTH = 3  # an optimizer's groups are dicts in a list, with lists of parameters in them
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)
_CHANGEABLE = (nn.Module, Optimizer, LRScheduler, GradScaler)


@final
class StateSnapshot:
    """Saves and restores attributes of objects, lists and dicts in them, and gradients."""

    def __init__(self) -> None:
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def keep(self, holder: object) -> None:
        """Save the attributes of a model, an optimizer or a similar object."""
        modules = every_module(holder) if isinstance(holder, nn.Module) else ()
        for module in modules:
            self._keep(vars(module), 0)
            self.keep_gradients(parameter for _, parameter in own_parameters(module))
        if isinstance(holder, Optimizer):
            groups = holder.param_groups
            self.keep_gradients(parameter for group in groups for parameter in group["params"])
        self._keep(vars(holder), 0)

    def keep_container(self, container: object) -> None:
        """Save the content of a list, dict or set, and of containers in it."""
        self._keep(container, 0)

    def keep_gradients(self, tensors: Iterable[torch.Tensor]) -> None:
        """Save the gradients of those tensors that are leaves."""
        for tensor in tensors:
            if tensor.is_leaf:
                # A fake gradient is the step's: a reference would keep its memory alive.
                gradient = None if isinstance(tensor.grad, FakeTensor) else tensor.grad
                self._gradients.setdefault(id(tensor), (tensor, gradient))

    def put_back(self) -> None:
        """Restore everything that was saved."""
        for container, content in self._containers.values():
            _fill(container, content)
        for tensor, gradient in self._gradients.values():
            if tensor.is_leaf and tensor.grad is not gradient:  # in-place writes end a leaf
                tensor.grad = gradient
        self._containers.clear()
        self._gradients.clear()

    def _keep(self, container: Any, depth: int) -> None:
        if type(container) not in _CONTAINERS or id(container) in self._containers:
            return
        self._containers[id(container)] = (container, container.copy())
        if depth < _MAX_DEPTH:
            values = container.values() if isinstance(container, dict) else container
            for value in values:
                self._keep(value, depth + 1)


def find_changeable(step: Callable[[], object]) -> Iterator[Any]:
    """The models, optimizers, schedulers and scalers that a step's functions refer to."""
    return (value for _, value in _walk(step) if isinstance(value, _CHANGEABLE))


def find_leftovers(step: Callable[[], object]) -> Iterator[str]:
    """Names, in a step's functions, of other objects that contain fake tensors."""
    for name, value in _walk(step):
        if not isinstance(value, _CHANGEABLE) and _holds_fakes(value, 0):
            yield name


def _walk(step: Callable[[], object]) -> Iterator[tuple[str, Any]]:
    """The objects that a step's functions refer to, with their names, each object once."""
    seen: set[int] = set()
    pending: list[tuple[str, Any]] = [("step", step)]
    while pending:
        name, named = pending.pop()
        if id(named) in seen:
            continue
        seen.add(id(named))
        yield name, named
        if isinstance(named, MethodType):
            pending.append((name, named.__func__))
            pending.extend(getattr(named.__self__, "__dict__", {}).items())
        elif isinstance(named, functools.partial):
            pending.extend(
                (name, value) for value in (named.func, *named.args, *named.keywords.values())
            )
        elif isinstance(named, FunctionType) and not _is_torchs(named):
            pending.extend(_named_in(named))


def _named_in(function: FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # the cell is still empty
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
        members: Iterable[Any] = list(value.values())
    elif isinstance(value, list | tuple | set):
        members = list(value)
    elif isinstance(value, type | ModuleType | FunctionType | MethodType | torch.Tensor):
        return False
    else:
        members = list(getattr(value, "__dict__", {}).values())
    return any(_holds_fakes(member, depth + 1) for member in members)


def _is_torchs(function: FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] in ("torch", "shardscope")


def _fill(container: Any, content: Any) -> None:
    if isinstance(container, list):
        container[:] = content
    else:
        container.clear()
        container.update(content)


_set_version_counter = find_name(
    "torch._C._autograd._unsafe_set_version_counter",
    "restore tensor versions, so that an earlier autograd graph stays valid",
)


@final
class TensorBackup:
    """Saves values of tensors, on the host, and restores those that changed."""

    def __init__(self) -> None:
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor, int | None]] = {}

    def keep(self, tensor: torch.Tensor) -> None:
        """Save a tensor's values, unless it has no data."""
        if id(tensor) in self._saved or tensor.is_meta or isinstance(tensor, FakeTensor):
            return
        with torch.no_grad():
            copy = tensor.detach().clone() if tensor.is_cpu else tensor.detach().cpu()
        self._saved[id(tensor)] = (tensor, copy, _version(tensor))

    def put_back(self) -> None:
        """Restore the values of each tensor that changed."""
        with torch.no_grad():
            for tensor, values, version in self._saved.values():
                if _version(tensor) != version or not _is_same(tensor, values):
                    _restore(tensor, values)
                    _set_version(tensor, version)
        self._saved.clear()


def _version(tensor: torch.Tensor) -> int | None:
    """The version counter; None for inference tensors."""
    return None if tensor.is_inference() else tensor._version


def _is_same(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    # Changes through .data leave the version as it was.
    now, before = _list_plain(tensor.detach().to(values.device)), _list_plain(values)
    return len(now) == len(before) and all(
        current.shape == saved.shape
        and current.dtype == saved.dtype
        and torch.equal(current, saved)
        for current, saved in zip(now, before, strict=True)
    )


def _list_plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Dense tensors with the values of a tensor, which may be nested, quantized or sparse."""
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.is_quantized:
        return [tensor.int_repr()]
    return [tensor if tensor.layout is torch.strided else tensor.to_dense()]


def _restore(tensor: torch.Tensor, values: torch.Tensor) -> None:
    if tensor.is_nested:
        for part, saved in zip(tensor.unbind(), values.unbind(), strict=True):
            part.data.copy_(saved)
    elif tensor.shape != values.shape or tensor.dtype != values.dtype:
        tensor.data = values.to(tensor.device)
    elif tensor.is_inference():
        with torch.inference_mode():
            tensor.copy_(values)
    elif tensor.layout is not torch.strided:
        tensor.copy_(values)  # .data of a sparse tensor is another tensor
    else:
        tensor.data.copy_(values)


def _set_version(tensor: torch.Tensor, version: int | None) -> None:
    # An earlier autograd graph must not find its saved tensors changed.
    if version is not None:
        _set_version_counter((tensor,), (version,))
