"""Names of modules: free of wrappers, chosen by the user, one for each position in the module
tree.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch
import torch.fx
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardscope._torch.fsdp import outermost_module, user_class
from shardscope._torch.modules import (
    callable_children,
    is_wrapper,
    named_modules_with_aliases,
    own_parameters,
    parameter_named,
    unwrap,
)
from shardscope.attribution.call_sites import is_called_by_torch
from shardscope.errors import TraceError

Models = nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module] | None
"""One model, several with names, several without, or None for whichever are called."""

NO_MODULE = -1
UNNAMED = -3
"""Indices, as all below zero, without a name: outside any module, or in one that has none."""


@final
class ModuleNames:
    """Names by module, for the models that the user passed and for any other that is called.

    With `keep_wrappers`, names are torch's and include wrappers such as `DistributedDataParallel`.
    """

    def __init__(self, models: Models, *, keep_wrappers: bool = False) -> None:
        self._keep_wrappers = keep_wrappers
        self.names: list[str] = []
        self._modules: list[weakref.ref[nn.Module]] = []
        self._index: dict[str, int] = {}
        self._indices: dict[int, list[int]] = {}
        self.unique_index: dict[int, int] = {}  # of modules with a single name, by id
        self._guards: dict[int, weakref.ref[nn.Module]] = {}
        self._parameters: dict[int, tuple[int, str]] = {}  # by id: index of the owner, name in it
        self._roots: list[weakref.ref[nn.Module]] = []
        self._num_user_names = 0
        self._lock = threading.RLock()  # modules may be called first on any thread
        self.has_data_parallel = False
        for prefix, model in _named_models(models).items():
            self._add(model, prefix)
        self._num_user_names = len(self.names)

    def find(self, module: nn.Module, caller: int = NO_MODULE) -> int:
        """The index of `module`'s name; `caller` is the index of the module that calls it."""
        indices = self._indices.get(id(module)) or self._name_unknown(module, caller)
        if len(indices) == 1 or caller < 0:
            return indices[0]
        return self._nearest(indices, self.names[caller])

    def name(self, index: int) -> str | None:
        """The name behind an index."""
        return None if index < 0 else self.names[index]

    def index(self, name: str) -> int:
        """The index of a name."""
        return self._index.get(name, NO_MODULE)

    def module(self, index: int) -> nn.Module | None:
        """The module behind an index, unwrapped, if it is still alive."""
        return self._modules[index]()

    def module_named(self, name: str) -> nn.Module | None:
        """The module behind a name, if there is one and it is still alive."""
        index = self._index.get(name)
        return None if index is None else self.module(index)

    def owner_of(self, parameter: torch.Tensor) -> int:
        """The index of the module that owns `parameter`."""
        name = self._own_name(parameter)
        if name is None:  # it may have been assigned to a module since
            for index in range(len(self.names)):
                self._add_parameters(index)
            name = self._own_name(parameter)
        return NO_MODULE if name is None else self._parameters[id(parameter)][0]

    def parameter_name(self, parameter: torch.Tensor) -> str | None:
        """The qualified name of `parameter`, without wrappers."""
        owner = self.owner_of(parameter)
        name = self._own_name(parameter)
        return None if name is None else f"{self.names[owner]}.{name}".lstrip(".")

    def _own_name(self, parameter: torch.Tensor) -> str | None:
        """The name of `parameter` in its last known owner, if it is still a parameter of that."""
        index, name = self._parameters.get(id(parameter), (NO_MODULE, ""))
        module = None if index == NO_MODULE else self.module(index)
        is_own = module is not None and parameter_named(module, name) is parameter
        return name if is_own else None

    def roots(self) -> Iterator[nn.Module]:
        """The outermost modules, from which names start."""
        yield from (root for root in (reference() for reference in self._roots) if root is not None)

    def aliases(self, index: int) -> tuple[str, ...]:
        """Further names of the module behind `index`, if this is its first name."""
        module = self.module(index)
        indices = [] if module is None else self._indices.get(id(module), [])
        if not indices or indices[0] != index:
            return ()
        return tuple(self.names[alias] for alias in indices[1:])

    def is_alias(self, index: int) -> bool:
        """Whether the module behind `index` has an earlier name."""
        module = self.module(index)
        return module is not None and self._indices.get(id(module), [index])[0] != index

    def _name_unknown(self, module: nn.Module, caller: int) -> list[int]:
        """Add names for a module that is called but was not known; its indices."""
        if isinstance(unwrap(module), torch.fx.GraphModule) and is_called_by_torch(sys._getframe()):
            return [caller]  # a graph that torch.compile made from the caller
        with self._lock:
            for root in (outermost_module(module), module):
                if id(root) not in self._indices:
                    self._add(root, self._name_root(root, caller))
            return self._indices[id(module)]

    def _name_root(self, root: nn.Module, caller: int) -> str:
        wrapped = root if self._keep_wrappers else unwrap(root)
        if wrapped is not root and id(wrapped) in self._indices:
            return self.names[self._indices[id(wrapped)][0]]
        parent = None if caller < 0 else self.module(caller)
        for name, child in () if parent is None else callable_children(parent):
            if child is root:  # registered after the names were read
                return f"{self.names[caller]}.{name}".lstrip(".")
        # Reuse names of dead modules: a forward may create a new module at every call.
        cls = type(root) if self._keep_wrappers else user_class(wrapped)
        return self._unique_name(cls.__name__, may_be_dead=caller >= 0)

    def _nearest(self, indices: list[int], caller: str) -> int:
        """The index with the shortest name below `caller`, else of a module around it."""
        prefix = f"{caller}." if caller else ""
        below = [index for index in indices if self.names[index].startswith(prefix)]
        if below:
            return min(below, key=lambda index: self.names[index].count("."))
        around = (index for index in indices if f"{caller}.".startswith(f"{self.names[index]}."))
        return next(around, indices[0])

    def _add(self, root: nn.Module, prefix: str) -> None:
        for name, module in named_modules_with_aliases(
            root, prefix, keep_wrappers=self._keep_wrappers
        ):
            if self._has_user_name(module):  # names from the user take precedence
                continue
            index = self._index.setdefault(name, len(self.names))
            if index == len(self.names):
                self.names.append(name)
                self._modules.append(weakref.ref(module))
            elif self._is_replaceable(index):
                self._modules[index] = weakref.ref(module)
            self._add_index(module, index)
            self.has_data_parallel |= isinstance(module, DistributedDataParallel)
            self._add_parameters(index)
        self._roots = [
            *(reference for reference in self._roots if reference() is not None),
            weakref.ref(root),
        ]

    def _add_parameters(self, index: int) -> None:
        # By id, without even a weak reference, which would keep torch from swapping the tensor.
        module = self.module(index)
        for name, parameter in () if module is None else own_parameters(module):
            if self._own_name(parameter) is None:
                self._parameters[id(parameter)] = (index, name)

    def _has_user_name(self, module: nn.Module) -> bool:
        indices = self._indices.get(id(module))
        return (
            self._num_user_names > 0 and indices is not None and indices[0] < self._num_user_names
        )

    def _is_replaceable(self, index: int) -> bool:
        module = self.module(index)
        return module is None or is_wrapper(module)

    def _add_index(self, module: nn.Module, index: int) -> None:
        key = id(module)
        indices = self._indices.setdefault(key, [])
        if index not in indices:
            indices.append(index)
        if len(indices) == 1:
            self.unique_index[key] = index
        else:
            self.unique_index.pop(key, None)
        if key not in self._guards:
            # The id of a dead module may be reused: drop the entry when the module dies.
            self._guards[key] = weakref.ref(module, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        self._indices.pop(key, None)
        self.unique_index.pop(key, None)
        self._guards.pop(key, None)

    def _unique_name(self, name: str, *, may_be_dead: bool = False) -> str:
        candidate, count = name, 1
        while candidate in self._index:
            if may_be_dead and self.module_named(candidate) is None:
                break
            count += 1
            candidate = f"{name}#{count}"
        return candidate


def _named_models(models: Models) -> dict[str, nn.Module]:
    named: Mapping[str, nn.Module]
    if models is None:
        named = {}
    elif isinstance(models, Mapping):
        named = models
    elif isinstance(models, Sequence):
        named = {str(index): model for index, model in enumerate(models)}
    else:
        named = {"": models}
    for name, model in named.items():
        if not isinstance(name, str):
            raise TraceError(
                f"trace() got a dict of models with the key {name!r}. "
                "Give strings as names: they become prefixes of the module names."
            )
        if not isinstance(model, nn.Module):
            raise TraceError(
                f"trace() got {type(model).__name__} instead of a module. Give a model, a list "
                "of models or a dict from name to model, or nothing to follow every module called."
            )
    return dict(named)
