"""Names for modules: clean, the user's own, one for each place in the tree.

A shared module has a name for each of its places; the module that calls it tells which is meant.
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
    called_children,
    is_wrapper,
    named_places,
    own_parameters,
    parameter_named,
    unwrap,
)
from shardscope.comm.stack import is_called_by_torch
from shardscope.errors import TraceError

__all__ = ["NO_MODULE", "UNNAMED", "Models", "ModuleNames"]

Models = nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module] | None
"""One model, several with names, several without, or None for whichever are called."""

NO_MODULE = -1
UNNAMED = -3
"""Indices, as all below zero, without a name: outside any module, or in one that has none."""


@final
class ModuleNames:
    """Names by module, for the models given and for any other that turns up.

    With `keep_wrappers`, names are torch's, in which `DistributedDataParallel` and its like show.
    """

    def __init__(self, models: Models, *, keep_wrappers: bool = False) -> None:
        self._keep_wrappers = keep_wrappers
        self.names: list[str] = []
        self._modules: list[weakref.ref[nn.Module]] = []
        self._index: dict[str, int] = {}
        self._places: dict[int, list[int]] = {}
        self.only_places: dict[int, int] = {}  # of modules that have but one, which is most
        self._guards: dict[int, weakref.ref[nn.Module]] = {}
        self._parameters: dict[int, tuple[int, str]] = {}  # who holds it, under which name
        self._roots: list[weakref.ref[nn.Module]] = []
        self._num_given = 0
        self._lock = threading.RLock()  # models are met on any thread
        self.has_data_parallel = False
        for prefix, model in _named_models(models).items():
            self._add(model, prefix)
        self._num_given = len(self.names)

    def find(self, module: nn.Module, caller: int = NO_MODULE) -> int:
        """The index of `module`'s name, when `caller` is the index of the module calling it."""
        places = self._places.get(id(module)) or self._meet(module, caller)
        if len(places) == 1 or caller < 0:
            return places[0]
        return self._nearest(places, self.names[caller])

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
        """The module that holds `parameter`, as an index."""
        name = self._own_name(parameter)
        if name is None:  # it may have taken another's place since
            for index in range(len(self.names)):
                self._add_parameters(index)
            name = self._own_name(parameter)
        return NO_MODULE if name is None else self._parameters[id(parameter)][0]

    def parameter_name(self, parameter: torch.Tensor) -> str | None:
        """The full clean name of `parameter`."""
        owner = self.owner_of(parameter)
        name = self._own_name(parameter)
        return None if name is None else f"{self.names[owner]}.{name}".lstrip(".")

    def _own_name(self, parameter: torch.Tensor) -> str | None:
        """The name of `parameter` in the module that was last seen to hold it, if it still does."""
        index, name = self._parameters.get(id(parameter), (NO_MODULE, ""))
        module = None if index == NO_MODULE else self.module(index)
        is_held = module is not None and parameter_named(module, name) is parameter
        return name if is_held else None

    def roots(self) -> Iterator[nn.Module]:
        """The models that the names begin at."""
        yield from (root for root in (reference() for reference in self._roots) if root is not None)

    def aliases(self, index: int) -> tuple[str, ...]:
        """Further names of the module behind `index`, if this is its first name."""
        module = self.module(index)
        places = [] if module is None else self._places.get(id(module), [])
        if not places or places[0] != index:
            return ()
        return tuple(self.names[place] for place in places[1:])

    def is_alias(self, index: int) -> bool:
        """Whether the module behind `index` has an earlier name."""
        module = self.module(index)
        return module is not None and self._places.get(id(module), [index])[0] != index

    def _meet(self, module: nn.Module, caller: int) -> list[int]:
        """Name a module that was not known before it was called."""
        if isinstance(unwrap(module), torch.fx.GraphModule) and is_called_by_torch(sys._getframe()):
            return [caller]  # a graph that a compiler made of the caller
        with self._lock:
            for root in (outermost_module(module), module):
                if id(root) not in self._places:
                    self._add(root, self._name_root(root, caller))
            return self._places[id(module)]

    def _name_root(self, root: nn.Module, caller: int) -> str:
        wrapped = root if self._keep_wrappers else unwrap(root)
        if wrapped is not root and id(wrapped) in self._places:
            return self.names[self._places[id(wrapped)][0]]
        holder = None if caller < 0 else self.module(caller)
        for name, child in () if holder is None else called_children(holder):
            if child is root:  # registered since the names were made
                return f"{self.names[caller]}.{name}".lstrip(".")
        # Forwards that make a module afresh each time would otherwise make names without end.
        cls = type(root) if self._keep_wrappers else user_class(wrapped)
        return self._unused(cls.__name__, may_be_dead=caller >= 0)

    def _nearest(self, places: list[int], caller: str) -> int:
        """The place below `caller` that is nearest to it, or else the one that it is within."""
        prefix = f"{caller}." if caller else ""
        below = [place for place in places if self.names[place].startswith(prefix)]
        if below:
            return min(below, key=lambda place: self.names[place].count("."))
        around = (p for p in places if f"{caller}.".startswith(f"{self.names[p]}."))
        return next(around, places[0])

    def _add(self, root: nn.Module, prefix: str) -> None:
        for name, module in named_places(root, prefix, keep_wrappers=self._keep_wrappers):
            if self._is_given(module):  # the user's names for it are the better ones
                continue
            index = self._index.setdefault(name, len(self.names))
            if index == len(self.names):
                self.names.append(name)
                self._modules.append(weakref.ref(module))
            elif self._is_replaceable(index):
                self._modules[index] = weakref.ref(module)
            self._place(module, index)
            self.has_data_parallel |= isinstance(module, DistributedDataParallel)
            self._add_parameters(index)
        self._roots = [*(known for known in self._roots if known() is not None), weakref.ref(root)]

    def _add_parameters(self, index: int) -> None:
        # Without a reference, even a weak one: torch does not move tensors that have any.
        module = self.module(index)
        for name, parameter in () if module is None else own_parameters(module):
            if self._own_name(parameter) is None:
                self._parameters[id(parameter)] = (index, name)

    def _is_given(self, module: nn.Module) -> bool:
        places = self._places.get(id(module))
        return self._num_given > 0 and places is not None and places[0] < self._num_given

    def _is_replaceable(self, index: int) -> bool:
        module = self.module(index)
        return module is None or is_wrapper(module)

    def _place(self, module: nn.Module, index: int) -> None:
        key = id(module)
        places = self._places.setdefault(key, [])
        if index not in places:
            places.append(index)
        if len(places) == 1:
            self.only_places[key] = index
        else:
            self.only_places.pop(key, None)
        if key not in self._guards:
            # The id of a dead module may come back as another's: forget it when it dies.
            self._guards[key] = weakref.ref(module, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        self._places.pop(key, None)
        self.only_places.pop(key, None)
        self._guards.pop(key, None)

    def _unused(self, name: str, *, may_be_dead: bool = False) -> str:
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
