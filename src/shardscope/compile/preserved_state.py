"""Restores the state that a call has changed: arguments, globals, closures, class attributes,
random generators, and torch's modes.

    with preserved_call_state(fn, args, kwargs):
        fn(*args, **kwargs)
"""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from shardscope._torch.random_state import preserved_random_state
from shardscope._torch.snapshot import TensorBackup
from shardscope.compile.call_state import (
    GENERATORS,
    GLOBAL_OPERATIONS,
    PLAIN_TYPES,
    StateWalk,
    is_array,
    is_user_function,
    is_user_module,
    list_cells,
    list_slots,
    names_assigned_to,
    names_used,
    walk_call,
)
from shardscope.errors import CompileError


@contextmanager
def preserved_call_state(
    fn: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]
) -> Iterator[StateWalk]:
    """Restore on leaving all state that a call can reach, random state, and torch's modes.

    Yields the walk over that state; its `is_complete` is False if some state is not restored.
    """
    walk = walk_call(fn, args, kwargs)
    with (
        preserved_random_state(),
        _preserved_modes(),
        _preserved_values(value for _, value in walk),
    ):
        yield walk


@contextmanager
def preserved_code_state(fn: Callable[..., Any]) -> Iterator[None]:
    """Restore on leaving the globals, class attributes and closures that the code of `fn` uses.

    The attributes of `fn` itself, where it is a module, are not restored.
    """
    code = type(fn) if isinstance(fn, nn.Module) else fn
    with _preserved_values(value for _, value in StateWalk([("", code)])):
        yield


@contextmanager
def _preserved_modes() -> Iterator[None]:
    has_gradients, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_grad_enabled(has_gradients)
        torch.set_default_dtype(dtype)


@contextmanager
def _preserved_values(values: Iterable[Any]) -> Iterator[None]:
    snapshots = _ValueSnapshots()
    for value in values:
        snapshots.save(value)
    try:
        yield
    finally:
        snapshots.restore()


@final
class _ValueSnapshots:
    """Snapshots of values, which can be restored in place."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self._tensors = TensorBackup()

    def save(self, value: Any) -> None:
        """Take a snapshot of a value's own content; its parts have their own snapshots."""
        if isinstance(value, Tensor):
            self._save_tensor(value)
        elif isinstance(value, (MethodType, functools.partial, ModuleType, *PLAIN_TYPES)):
            pass
        elif isinstance(value, FunctionType):
            self._save_function(value)
        elif isinstance(value, type):
            self._save_class(value)
        elif isinstance(value, dict | list | set | deque | bytearray):
            self._save_container(value)
        elif isinstance(value, GENERATORS):
            self._save_generator(value)
        elif is_array(value):
            self._save_array(value)
        if not isinstance(value, (type, ModuleType, *PLAIN_TYPES)):
            self._save_attributes(value)

    def restore(self) -> None:
        """Restore all values, the last one first."""
        for undo in reversed(self._undo):
            undo()
        self._tensors.put_back()

    def _save_tensor(self, tensor: Tensor) -> None:
        if is_lazy(tensor):
            raise CompileError(
                "The model has lazy parameters, which get their shape in the first forward call. "
                "Call the model once before."
            )
        self._tensors.keep(tensor)
        if not tensor.is_leaf:
            return
        gradient = tensor.grad
        if gradient is not None:
            self._tensors.keep(gradient)

        def undo() -> None:
            if tensor.is_leaf and tensor.grad is not gradient:  # else restored in place
                tensor.grad = gradient

        self._undo.append(undo)

    def _save_container(self, container: Any) -> None:
        is_dict = isinstance(container, dict)
        content = list(container.items()) if is_dict else list(container)
        kind = next(base for base in _CONTAINERS if isinstance(container, base))

        def undo() -> None:
            now = list(container.items()) if is_dict else list(container)
            if not _is_identical(now, content):
                kind.clear(container)
                fill = kind.update if hasattr(kind, "update") else kind.extend
                fill(container, content)

        self._undo.append(undo)

    def _save_attributes(self, value: Any) -> None:
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict):
            attributes = {}
        self._save_container(attributes)
        for name in list_slots(value):
            self._undo.append(functools.partial(_set_slot, value, name, getattr(value, name)))
        if isinstance(value, nn.Module | Optimizer):  # private containers are not walked
            for attribute in attributes.values():
                if isinstance(attribute, dict | list | set):
                    self._save_container(attribute)

    def _save_function(self, function: FunctionType) -> None:
        for _, cell in list_cells(function):
            try:
                content = cell.cell_contents
            except ValueError:  # an empty cell
                continue
            self._undo.append(functools.partial(setattr, cell, "cell_contents", content))
        if is_user_function(function):
            scope, code = function.__globals__, function.__code__
            self._save_names(scope, names_used(code, "STORE_GLOBAL", "DELETE_GLOBAL"))
            for name in names_used(code, *GLOBAL_OPERATIONS):
                module = scope.get(name)
                if isinstance(module, ModuleType):
                    is_users = is_user_module(module.__name__)
                    stored = names_used(code, "STORE_ATTR") if is_users else ()
                    self._save_names(vars(module), stored or names_assigned_to(code, name))

    def _save_names(self, scope: dict[str, Any], names: Iterable[str]) -> None:
        """Take a snapshot of some globals of a module."""
        for name in names:
            if name in scope:
                self._undo.append(functools.partial(scope.__setitem__, name, scope[name]))
            else:
                self._undo.append(functools.partial(scope.pop, name, None))

    def _save_class(self, cls: type) -> None:
        if not is_user_module(cls.__module__):
            return
        attributes = {
            name: attribute for name, attribute in vars(cls).items() if not name.startswith("__")
        }

        def undo() -> None:
            now = {
                name: attribute
                for name, attribute in vars(cls).items()
                if not name.startswith("__")
            }
            for name in now.keys() - attributes.keys():
                delattr(cls, name)
            for name, attribute in attributes.items():
                if now.get(name) is not attribute:
                    setattr(cls, name, attribute)

        self._undo.append(undo)

    def _save_generator(self, generator: Any) -> None:
        if isinstance(generator, torch.Generator):
            self._undo.append(functools.partial(generator.set_state, generator.get_state()))
        else:
            self._undo.append(functools.partial(generator.setstate, generator.getstate()))

    def _save_array(self, array: Any) -> None:
        content = array.copy()

        def undo() -> None:
            if array.flags.writeable and array.tobytes() != content.tobytes():
                array[...] = content

        self._undo.append(undo)


def _set_slot(value: Any, name: str, content: Any) -> None:
    if getattr(value, name, None) is not content:
        object.__setattr__(value, name, content)


_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque, bytearray)


def _is_identical(now: list[Any], before: list[Any]) -> bool:
    """Whether two lists contain the same objects; pairs are compared item by item."""
    if len(now) != len(before):
        return False
    for item, previous in zip(now, before, strict=True):
        if (
            isinstance(item, tuple)
            and isinstance(previous, tuple)
            and len(item) == len(previous) == 2
        ):
            if item[0] is not previous[0] or item[1] is not previous[1]:
                return False
        elif item is not previous:
            return False
    return True
