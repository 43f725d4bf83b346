"""Names for modules: clean, the user's own, one for each place in the tree.

A shared module has a name for each of its places; the module that calls it tells which is meant.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.fx
from torch import nn

from shardscope._torch.fsdp import outermost_module
from shardscope._torch.modules import is_wrapper, named_places, own_parameters
from shardscope.errors import TraceError

__all__ = ["NO_MODULE", "Models", "ModuleNames"]

Models = nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module] | None
"""One model, several with names, several without, or None for whichever are called."""

NO_MODULE = -1


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
        self._guards: dict[int, weakref.ref[nn.Module]] = {}
        self._parameters: dict[int, int] = {}
        self._roots: list[weakref.ref[nn.Module]] = []
        for prefix, model in _named_models(models).items():
            self._add(model, prefix)

    def find(self, module: nn.Module, caller: int = NO_MODULE) -> int:
        """The index of `module`'s name, when `caller` is the index of the module calling it."""
        places = self._places.get(id(module))
        if places is None:
            root = outermost_module(module)
            self._add(root, self._unused(type(root).__name__))
            places = self._places.get(id(module)) or self._add(
                module, self._unused(type(module).__name__)
            )
        if len(places) == 1 or caller == NO_MODULE:
            return places[0]
        prefix = f"{self.names[caller]}." if self.names[caller] else ""
        return next((p for p in places if self.names[p].startswith(prefix)), places[0])

    def name(self, index: int) -> str | None:
        """The name behind an index."""
        return None if index == NO_MODULE else self.names[index]

    def module(self, index: int) -> nn.Module | None:
        """The module behind an index, unwrapped, if it is still alive."""
        return self._modules[index]()

    def module_named(self, name: str) -> nn.Module | None:
        """The module behind a name, if there is one and it is still alive."""
        index = self._index.get(name)
        return None if index is None else self.module(index)

    def owner_of(self, parameter: torch.Tensor) -> int:
        """The module that holds `parameter`, as an index."""
        return self._parameters.get(id(parameter), NO_MODULE)

    def parameter_name(self, parameter: torch.Tensor) -> str | None:
        """The full clean name of `parameter`."""
        owner = self.owner_of(parameter)
        module = None if owner == NO_MODULE else self.module(owner)
        for name, candidate in own_parameters(module) if module is not None else ():
            if candidate is parameter:
                return f"{self.names[owner]}.{name}".lstrip(".")
        return None

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

    def _add(self, root: nn.Module, prefix: str) -> list[int]:
        for name, module in named_places(root, prefix, keep_wrappers=self._keep_wrappers):
            index = self._index.setdefault(name, len(self.names))
            if index == len(self.names):
                self.names.append(name)
                self._modules.append(weakref.ref(module))
            elif self._is_wrapper(index):
                self._modules[index] = weakref.ref(module)
            self._place(module, index)
            for _, parameter in own_parameters(module):
                self._parameters.setdefault(id(parameter), index)
        self._roots.append(weakref.ref(root))
        return self._places[id(root)]

    def _is_wrapper(self, index: int) -> bool:
        module = self.module(index)
        return module is not None and is_wrapper(module)

    def _place(self, module: nn.Module, index: int) -> None:
        key = id(module)
        places = self._places.setdefault(key, [])
        if index not in places:
            places.append(index)
        if key not in self._guards:
            # The id of a dead module may come back as another's: forget it when it dies.
            self._guards[key] = weakref.ref(module, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        self._places.pop(key, None)
        self._guards.pop(key, None)

    def _unused(self, name: str) -> str:
        candidate, count = name, 1
        while candidate in self._index:
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
        if not isinstance(name, str) or not isinstance(model, nn.Module):
            raise TraceError(
                f"trace() got {type(model).__name__} where it wants a module. Give a model, a list "
                "of models or a dict from name to model, or nothing to follow every module called."
            )
    return dict(named)
