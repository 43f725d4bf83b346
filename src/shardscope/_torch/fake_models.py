"""A model's tensors, for a while, without their data."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from shardscope._torch.dispatch import detect_fake_mode, without_modes
from shardscope._torch.fakes import FakeTensor, is_fake
from shardscope._torch.modules import every_module
from shardscope._torch.restoring import Kept

__all__ = ["FakeTwins", "StandIns"]

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


@final
class FakeTwins:
    """Puts tensors without data in the place of a model's and of its optimizers', and back."""

    def __init__(self, mode: Any) -> None:
        self.lost_classes: set[str] = set()  # of parameters whose twins are plain ones
        self._mode = mode
        self._kept = Kept()
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._bases: dict[int, torch.Tensor] = {}  # by storage, for tensors on meta
        self._optimizers: dict[int, Optimizer] = {}

    @contextmanager
    def replacing(self, models: Iterable[nn.Module], others: Iterable[object]) -> Iterator[None]:
        """The models have twins until the context ends; then they and `others` are as before."""
        models, others = list(models), list(others)
        for holder in (*models, *others):
            self._kept.keep(holder)
        try:
            for module in chain.from_iterable(map(every_module, models)):
                named = chain(module._parameters.items(), module._buffers.items())
                for name, tensor in list(named):
                    if tensor is not None and not is_fake(tensor):
                        setattr(module, name, self.of(tensor))
            for one in others:
                if isinstance(one, Optimizer):
                    self.replace_in(one)
            yield
        finally:
            self._kept.put_back()
            self._optimizers.clear()
            self._twins.clear()
            self._bases.clear()

    def replace_in(self, optimizer: Optimizer) -> None:
        """Let the optimizer work on the twins of its parameters, from a twin of its state."""
        params = [one for group in optimizer.param_groups for one in group["params"]]
        if id(optimizer) in self._optimizers or all(map(is_fake, params)):
            return
        self._optimizers[id(optimizer)] = optimizer
        self._kept.keep(optimizer)
        state = optimizer.state
        optimizer.state = type(state)(state.default_factory)
        for group in optimizer.param_groups:
            group["params"][:] = [self._twin(one) for one in group["params"]]
        for parameter, held in state.items():
            optimizer.state[self._twin(parameter)] = self._state(held)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The one twin of a tensor."""
        known = self._twins.get(id(tensor))
        if known is None:
            make = self._make_of_meta if tensor.is_meta else self._mode.from_tensor
            known = self._twins[id(tensor)] = (tensor, make(tensor))
            self._copy_attributes(*known)
        return known[1]

    def has_twin(self, tensor: torch.Tensor) -> bool:
        """Whether another tensor is in this one's place."""
        return id(tensor) in self._twins

    def _twin(self, tensor: Any) -> Any:
        return self._twins[id(tensor)][1] if id(tensor) in self._twins else tensor

    def _state(self, held: Any) -> Any:
        """An optimizer's state without data, but for its counters, which its arithmetic needs."""
        if isinstance(held, torch.Tensor):
            return self._counter(held) if _is_counter(held) else self.of(held)
        if isinstance(held, dict):
            return {name: self._state(value) for name, value in held.items()}
        if type(held) in (list, tuple):
            return type(held)(map(self._state, held))
        return held

    def _counter(self, tensor: torch.Tensor) -> torch.Tensor:
        with without_modes():
            value = tensor.item()
        with self._mode:
            return torch.tensor(value, dtype=tensor.dtype, device=tensor.device)

    def _copy_attributes(self, tensor: torch.Tensor, twin: torch.Tensor) -> None:
        """What the user has put on a tensor is on its twin: attributes and hooks."""
        if type(tensor) not in _PLAIN and type(twin) is FakeTensor and not is_fake(tensor):
            self.lost_classes.add(type(tensor).__name__)
        for name, value in vars(tensor).items():
            if name not in vars(twin):
                setattr(twin, name, value)
        if tensor._backward_hooks:
            twin._backward_hooks = OrderedDict(tensor._backward_hooks)
        for hook in (tensor._post_accumulate_grad_hooks or {}).values():
            twin.register_post_accumulate_grad_hook(_about(tensor, hook))

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


@final
class StandIns:
    """Tensors with data that a step meets where tensors have none: one stand-in for each.

    Without, each view of such a tensor would have a storage of its own.
    """

    def __init__(self, twins: FakeTwins | None, *, device_type: str) -> None:
        self.num_captured = 0  # parameters whose twins the step should have used
        self._mode = detect_fake_mode()
        self._twins = twins
        self._device_type = device_type  # where stand-ins of tensors on meta are
        self._known: dict[int, tuple[Any, torch.Tensor]] = {}

    def are_needed(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor has data, or is on meta, where others are fake."""
        return self._mode is not None and type(tensor) in _PLAIN

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's stand-in, or the tensor itself."""
        if not self.are_needed(tensor):
            return tensor
        if self._twins is not None and self._twins.has_twin(tensor):
            self.num_captured += isinstance(tensor, nn.Parameter)
            return self._twins.of(tensor)
        known = self._known.get(id(tensor))
        if known is None:
            key = id(tensor)
            gone = weakref.ref(tensor, lambda _: self._known.pop(key, None))
            known = self._known[key] = (gone, self._make(tensor))
        return known[1]

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._mode is not None
        if not tensor.is_meta:
            stand_in: torch.Tensor = self._mode.from_tensor(tensor)
            return stand_in
        with self._mode:
            made = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device_type
            )
            return made.requires_grad_(tensor.requires_grad)


def _is_counter(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 0 and type(tensor) in _PLAIN and not tensor.is_meta


def _about(tensor: torch.Tensor, hook: Callable[..., Any]) -> Callable[[torch.Tensor], None]:
    """A hook of `tensor` for its twin: it may know optimizers and names by the tensor itself."""

    def run(twin: torch.Tensor) -> None:
        before, given = tensor.grad, twin.grad
        tensor.grad = given
        try:
            hook(tensor)
            if twin.grad is given:  # else an optimizer that works on the twin has cleared it
                twin.grad = tensor.grad
        finally:
            tensor.grad = before

    return run
