"""Replaces the tensors of a model and its optimizers by fake ones, and restores them."""

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

from shardscope._torch.dispatch import detect_fake_mode, disable_dispatch_modes
from shardscope._torch.fake import FakeTensor, is_fake
from shardscope._torch.modules import every_module
from shardscope._torch.snapshot import StateSnapshot
from shardscope._torch.tree import map_tensor_leaves

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


@final
class FakeTensorMap:
    """Fake twins of the tensors of models and optimizers, while they replace them."""

    def __init__(self, mode: Any) -> None:
        self.lost_classes: set[str] = set()  # of parameters whose twins are plain tensors
        self._mode = mode
        self._snapshot = StateSnapshot()
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._bases: dict[int, torch.Tensor] = {}  # by storage, for tensors on meta
        self._optimizers: dict[int, Optimizer] = {}

    @contextmanager
    def replacing(self, models: Iterable[nn.Module], holders: Iterable[object]) -> Iterator[None]:
        """Replace the tensors of models and of optimizers among `holders` until the context ends.

        Then the attributes of all models and holders are restored.
        """
        models, holders = list(models), list(holders)
        for holder in (*models, *holders):
            self._snapshot.keep(holder)
        try:
            for module in chain.from_iterable(map(every_module, models)):
                named = chain(module._parameters.items(), module._buffers.items())
                for name, tensor in list(named):
                    if tensor is not None and not is_fake(tensor):
                        setattr(module, name, self.of(tensor))
            for optimizer in holders:
                if isinstance(optimizer, Optimizer):
                    self.replace_in(optimizer)
            yield
        finally:
            self._snapshot.put_back()
            self._optimizers.clear()
            self._twins.clear()
            self._bases.clear()

    def replace_in(self, optimizer: Optimizer) -> None:
        """Replace the parameters and state of an optimizer by their twins."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if id(optimizer) in self._optimizers or all(map(is_fake, params)):
            return
        self._optimizers[id(optimizer)] = optimizer
        self._snapshot.keep(optimizer)
        state = optimizer.state
        optimizer.state = type(state)(state.default_factory)
        for group in optimizer.param_groups:
            group["params"][:] = [self._twin(param) for param in group["params"]]
        for parameter, param_state in state.items():
            optimizer.state[self._twin(parameter)] = self._state(param_state)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The twin of a tensor, always the same."""
        pair = self._twins.get(id(tensor))
        if pair is None:
            make = self._make_of_meta if tensor.is_meta else self._mode.from_tensor
            pair = self._twins[id(tensor)] = (tensor, make(tensor))
            self._copy_attributes(*pair)
        return pair[1]

    def has_twin(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor was replaced by a twin."""
        return id(tensor) in self._twins

    def _twin(self, tensor: Any) -> Any:
        return self._twins[id(tensor)][1] if id(tensor) in self._twins else tensor

    def _state(self, value: Any) -> Any:
        """An optimizer's state without data, except counters, whose values its arithmetic needs."""
        return map_tensor_leaves(
            lambda tensor: self._counter(tensor) if _is_counter(tensor) else self.of(tensor), value
        )

    def _counter(self, tensor: torch.Tensor) -> torch.Tensor:
        with disable_dispatch_modes():
            value = tensor.item()
        with self._mode:
            return torch.tensor(value, dtype=tensor.dtype, device=tensor.device)

    def _copy_attributes(self, tensor: torch.Tensor, twin: torch.Tensor) -> None:
        """Copy attributes and hooks that the user added to a tensor to its twin."""
        if type(tensor) not in _PLAIN and type(twin) is FakeTensor and not is_fake(tensor):
            self.lost_classes.add(type(tensor).__name__)
        for name, value in vars(tensor).items():
            if name not in vars(twin):
                setattr(twin, name, value)
        if tensor._backward_hooks:
            twin._backward_hooks = OrderedDict(tensor._backward_hooks)
        for hook in (tensor._post_accumulate_grad_hooks or {}).values():
            twin.register_post_accumulate_grad_hook(_hook_for_twin(tensor, hook))

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
class FakeSubstitution:
    """A fake substitute for each tensor with data that a step uses although others are fake.

    Without a fixed substitute, each view of such a tensor would have a storage of its own.
    """

    def __init__(
        self, fake_map: FakeTensorMap | None, *, device_type: str, has_host_data: bool = False
    ) -> None:
        self._has_host_data = has_host_data  # tensors on the CPU have data on purpose
        self.num_captured = 0  # uses of parameters whose twins the step should have used
        self._mode = detect_fake_mode()
        self._twins = fake_map
        self._device_type = device_type  # of the substitutes of meta tensors
        self._substitutes: dict[int, tuple[Any, torch.Tensor]] = {}

    def are_needed(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor has data, or is on meta, while other tensors are fake."""
        is_plain = self._mode is not None and type(tensor) in _PLAIN
        return is_plain and (tensor.is_meta or not self._has_host_data)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's substitute, or the tensor itself if none is needed."""
        if not self.are_needed(tensor):
            return tensor
        if self._twins is not None and self._twins.has_twin(tensor):
            self.num_captured += isinstance(tensor, nn.Parameter)
            return self._twins.of(tensor)
        entry = self._substitutes.get(id(tensor))
        if entry is None:
            key = id(tensor)
            reference = weakref.ref(tensor, lambda _: self._substitutes.pop(key, None))
            entry = self._substitutes[key] = (reference, self._make(tensor))
        return entry[1]

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._mode is not None
        if not tensor.is_meta:
            substitute: torch.Tensor = self._mode.from_tensor(tensor)
            return substitute
        with self._mode:
            empty = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device_type
            )
            return empty.requires_grad_(tensor.requires_grad)


def _is_counter(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 0 and type(tensor) in _PLAIN and not tensor.is_meta


def _hook_for_twin(
    tensor: torch.Tensor, hook: Callable[..., Any]
) -> Callable[[torch.Tensor], None]:
    """Wrap a hook of `tensor` for its twin: the hook may look things up by the tensor itself."""

    def run(twin: torch.Tensor) -> None:
        before, gradient = tensor.grad, twin.grad
        tensor.grad = gradient
        try:
            hook(tensor)
            if twin.grad is gradient:  # else an optimizer that works on the twin has cleared it
                twin.grad = tensor.grad
        finally:
            tensor.grad = before

    return run
