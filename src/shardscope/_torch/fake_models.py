"""A model's tensors, for a while, without their data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer

from shardscope._torch.modules import every_module

__all__ = ["FakeTwins", "is_fake"]


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no data of its own."""
    return isinstance(tensor, FakeTensor)


@final
class FakeTwins:
    """Puts tensors without data in the place of a model's and of its optimizers', and back."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._bases: dict[int, torch.Tensor] = {}  # by storage, for tensors on meta
        self._optimizers: dict[int, tuple[Optimizer, list[list[Any]], Any]] = {}

    @contextmanager
    def replacing(self, models: Iterable[nn.Module]) -> Iterator[None]:
        """The models have twins until the context ends."""
        replaced: list[tuple[nn.Module, str, torch.Tensor]] = []
        try:
            for module in chain.from_iterable(map(every_module, models)):
                named = chain(module._parameters.items(), module._buffers.items())
                for name, tensor in list(named):
                    if tensor is not None and not is_fake(tensor):
                        replaced.append((module, name, tensor))
                        setattr(module, name, self.of(tensor))
            yield
        finally:
            for module, name, tensor in reversed(replaced):
                setattr(module, name, tensor)
            self._put_back()

    def replace_in(self, optimizer: Optimizer) -> None:
        """Let the optimizer work on the twins of its parameters, from a twin of its state."""
        if id(optimizer) in self._optimizers:
            return
        groups = optimizer.param_groups
        if not any(id(one) in self._twins for group in groups for one in group["params"]):
            return
        state = optimizer.state
        params = [list(group["params"]) for group in groups]
        self._optimizers[id(optimizer)] = (optimizer, params, state)
        optimizer.state = type(state)(state.default_factory)
        for group in groups:
            group["params"][:] = [self._twin(one) for one in group["params"]]
        for parameter, held in state.items():
            optimizer.state[self._twin(parameter)] = {
                name: self.of(value) if isinstance(value, torch.Tensor) else value
                for name, value in held.items()
            }

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The one twin of a tensor."""
        known = self._twins.get(id(tensor))
        if known is None:
            make = self._make_of_meta if tensor.is_meta else self._mode.from_tensor
            known = self._twins[id(tensor)] = (tensor, make(tensor))
        return known[1]

    def _twin(self, tensor: Any) -> Any:
        return self._twins[id(tensor)][1] if id(tensor) in self._twins else tensor

    def _make_of_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        base = self._bases.get(id(storage))
        with self._mode:
            if base is None:
                base = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
                self._bases[id(storage)] = base
            typed = base.view(tensor.dtype)
            twin = typed.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(twin, tensor.requires_grad)
            return twin

    def _put_back(self) -> None:
        for optimizer, params, state in self._optimizers.values():
            for group, held in zip(optimizer.param_groups, params, strict=True):
                group["params"][:] = held
            optimizer.state = state
        self._optimizers.clear()
        self._twins.clear()
        self._bases.clear()
