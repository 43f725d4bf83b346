"""Notes the data that a program makes outside its model, and replaces it in a single process."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, final

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.data_loading import watched_batches
from shardscope._torch.tree import leaves, map_leaves
from shardscope.attribution.call_sites import TORCH_FOLDER
from shardscope.parallel.parity.captured_data import (
    DataKey,
    DataOrigin,
    DataPlan,
    DataTensor,
    SharedData,
    is_equal,
    list_reaching,
)

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
# Functions of torch that work on gradients, parameters and shards, not on data.
_NO_DATA = tuple(
    os.path.join(TORCH_FOLDER, *path) for path in (("optim",), ("nn", "utils"), ("distributed",))
)
_RANDOM = frozenset(
    [
        "bernoulli",
        "bernoulli_",
        "multinomial",
        "normal",
        "normal_",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "random_",
        "randperm",
        "uniform_",
    ]
)
_MAX_BYTES = 1 << 26  # of a tensor that is copied


@final
class DataMode(TorchFunctionMode):
    """Follows tensors outside the model from where they are made to the model and the loss.

    On a rank it notes them; `list_used` returns those that reach the model or the loss. With a
    `plan` it runs in a single process, and replaces them by those of the ranks. `is_inside()` says
    whether the model is running.
    """

    def __init__(self, is_inside: Callable[[], bool], plan: DataPlan | None = None) -> None:
        super().__init__()
        self._is_inside = is_inside
        self._plan = plan
        self._is_paused = False
        self._counts: Counter[tuple[str, str]] = Counter()
        self._noted: dict[DataKey, DataTensor] = {}
        self._has_loss = False  # the model was called, and backward has not run since
        self._items: set[DataKey] = set()
        self._used: dict[DataKey, None] = {}
        self._keys = WeakIdKeyDictionary()  # of tensors outside the model
        self._replaced = WeakIdKeyDictionary()  # tensors that are, or come from, those of the ranks
        self._of_model = WeakIdKeyDictionary()  # tensors that come from what the model returns
        self.problems: dict[str, None] = {}
        """Sentences on data that could not be replaced."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow tensors until the context ends."""
        with watched_batches(self._take_batch), self:
            yield

    def list_used(self) -> list[DataTensor]:
        """The tensors that have reached the model or the loss, and those they come from."""
        noted = [
            DataTensor(t.key, t.origin, t.parents, t.value, t.key in self._items)
            for t in self._noted.values()
        ]
        return list_reaching(noted, list(self._used))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused or self._is_inside() or is_in_backward():
            return func(*args, **kwargs)
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(self._is_of_model(tensor) for tensor in tensors):
            name = getattr(func, "__name__", "")
            if self._has_loss and not all(map(self._is_of_model, tensors)):
                args, kwargs = self.take_arguments((args, kwargs), f"argument of {name}")
            result = func(*args, **kwargs)
            self._has_loss &= name != "backward"
            self._note_of_model(_tensors_of(result))
            return result
        parents = self._find_parents(tensors)  # now: the function may write to them
        result = func(*args, **kwargs)
        is_written = getattr(func, "__name__", "") == "__setitem__"  # which returns nothing
        outputs = tensors[:1] if is_written else _tensors_of(result)
        if not outputs or any(map(_is_parameter, outputs)):
            return result
        self._is_paused = True
        try:
            return self._note_result(func, (args, kwargs), tensors, parents, result, outputs)
        finally:
            self._is_paused = False

    def take_arguments(self, arguments: Any, function: str) -> Any:
        """The arguments of the model or of the loss, in a single process with the ranks' data."""
        is_paused, self._is_paused = self._is_paused, True
        try:
            line = _find_line()
            if line is None:
                return arguments
            count = self._count(line, function)
            position = -1

            def take(leaf: Any) -> Any:
                nonlocal position
                if not isinstance(leaf, torch.Tensor):
                    return leaf
                position += 1
                if self._is_of_model(leaf) or leaf.is_meta:
                    return leaf
                key = DataKey(line, function, count, str(position))
                is_own = self._plan is not None and leaf not in self._replaced
                if is_own or leaf not in self._keys or self._is_changed(leaf):
                    leaf = self._take(key, DataOrigin.COMPUTED, leaf, (), is_new=True)
                if leaf in self._keys:
                    self._used.setdefault(self._keys[leaf])
                return leaf

            return map_leaves(take, arguments)
        finally:
            self._is_paused = is_paused

    def note_outputs(self, outputs: Sequence[torch.Tensor]) -> None:
        """Note what the model has returned."""
        self._has_loss = True
        self._note_of_model(outputs)

    def _note_of_model(self, tensors: Sequence[torch.Tensor]) -> None:
        # A tensor that is noted has a weak reference, and cannot be swapped as parameters are when
        # a module is converted. So parameters, and DTensors that may become some, are not noted.
        for tensor in tensors:
            if not tensor.requires_grad and not isinstance(tensor, DTensor):
                self._of_model[tensor] = True

    def _is_of_model(self, tensor: torch.Tensor) -> bool:
        is_parameter = tensor.requires_grad or isinstance(tensor, DTensor)
        return is_parameter or tensor in self._of_model

    def _is_changed(self, tensor: torch.Tensor) -> bool:
        """Whether a collective or numpy has written to a tensor since it was noted."""
        noted = self._noted.get(self._keys[tensor])
        return noted is not None and not is_equal(noted.value, tensor.detach())

    def _find_parents(self, inputs: Sequence[torch.Tensor]) -> tuple[DataKey, ...]:
        """The keys of noted tensors among the arguments of a function that is about to run."""
        is_paused, self._is_paused = self._is_paused, True
        try:
            known = (tensor for tensor in inputs if tensor in self._keys)
            return tuple(self._keys[t] for t in known if not self._is_changed(t))
        finally:
            self._is_paused = is_paused

    def _count(self, line: str, function: str) -> int:
        self._counts[line, function] += 1
        return self._counts[line, function] - 1

    def _note_result(
        self,
        func: Callable[..., Any],
        arguments: Any,
        inputs: Sequence[torch.Tensor],
        parents: tuple[DataKey, ...],
        result: Any,
        outputs: Sequence[torch.Tensor],
    ) -> Any:
        line = _find_line()
        if line is None:
            return result
        name = getattr(func, "__name__", str(func))
        count = self._count(line, name)
        origin = DataOrigin.RANDOM if name in _RANDOM else DataOrigin.COMPUTED
        if any(isinstance(value, list | tuple) for value in arguments[0]):
            self._items.update(parents)
        is_replaced = any(tensor in self._replaced for tensor in inputs)
        replacements = {}
        for position, tensor in enumerate(outputs):
            key = DataKey(line, name, count, str(position))
            if isinstance(tensor, DTensor):
                continue
            if is_replaced:
                self._replaced[tensor] = True
                self._keys[tensor] = key
                continue
            is_own = any(tensor is value for value in inputs)  # changed in place
            taken = self._take(key, origin, tensor, parents, is_new=not is_own)
            replacements[id(tensor)] = taken
        return map_leaves(lambda leaf: replacements.get(id(leaf), leaf), result)

    def _take(
        self,
        key: DataKey,
        origin: DataOrigin,
        tensor: torch.Tensor,
        parents: tuple[DataKey, ...],
        *,
        is_new: bool,
    ) -> torch.Tensor:
        """Note a tensor; in a single process, return that of the ranks in its place."""
        if isinstance(tensor, DTensor) or tensor.nbytes > _MAX_BYTES or tensor.is_meta:
            return tensor
        if self._plan is None:
            self._noted[key] = DataTensor(key, origin, parents, tensor.detach().clone())
        else:
            shared = self._plan.find(key)
            value = None if shared is None else self._choose(shared, tensor, key)
            if value is not None:
                tensor = _replace(tensor, value, is_new=is_new)
                self._replaced[tensor] = True
        self._keys[tensor] = key
        return tensor

    def _choose(
        self, shared: SharedData, tensor: torch.Tensor, key: DataKey
    ) -> torch.Tensor | None:
        """What replaces a tensor of the single process; None if nothing does."""
        assert self._plan is not None
        shapes = [value.shape for value in shared.values]
        is_loaded = shared.origin is DataOrigin.LOADER
        if len(shapes) == 1 and not is_loaded:
            is_other = shapes[0] == tensor.shape and not is_equal(shared.values[0], tensor.detach())
            return shared.values[0] if is_other else None
        joined = shared.join(self._plan.dim)
        # Of a batch that the ranks drew together, numbers of its shape are drawn in a single call.
        is_drawn = shared.origin is DataOrigin.RANDOM and joined is not None
        if is_drawn and joined is not None and joined.shape == tensor.shape:
            return joined
        if not is_loaded and tensor.shape not in shapes and _contains(tensor.shape, shapes):
            return None  # the program shards a batch of all ranks
        if joined is None:
            self.problems.setdefault(
                f"the tensors that {key.function} makes at {key.line} have the shapes "
                f"{', '.join(str(list(shape)) for shape in dict.fromkeys(shapes))} on the ranks, "
                "which cannot be joined to one batch"
            )
        return joined

    def _take_batch(self, draw: Callable[[], Any]) -> Any:
        """The next batch of a data loader."""
        is_paused, self._is_paused = self._is_paused, True
        try:
            batch = draw()
            line = _find_line()
            if is_paused or line is None:
                return batch
            count = self._count(line, "loader")
            position = -1

            def take(leaf: Any) -> Any:
                nonlocal position
                if not isinstance(leaf, torch.Tensor):
                    return leaf
                position += 1
                key = DataKey(line, "loader", count, str(position))
                return self._take(key, DataOrigin.LOADER, leaf, (), is_new=True)

            return map_leaves(take, batch)
        finally:
            self._is_paused = is_paused


def _tensors_of(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, list | tuple):
        return [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
    return []


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad


def _replace(tensor: torch.Tensor, value: torch.Tensor, *, is_new: bool) -> torch.Tensor:
    """The value in place of a tensor; in its own memory, unless nothing else refers to it."""
    value = value.clone().to(tensor.device)
    if is_new:
        return value
    with torch.no_grad():
        tensor.resize_(value.shape).copy_(value)
    return tensor


def _contains(shape: torch.Size, shards: Sequence[torch.Size]) -> bool:
    """Whether a shape is that of the ranks' tensors one after the other along one dim."""
    if any(len(shard) != len(shape) for shard in shards):
        return False
    rests = [[*shape[:dim], *shape[dim + 1 :]] for dim in range(len(shape))]
    return any(
        sum(shard[dim] for shard in shards) == shape[dim]
        and all([*shard[:dim], *shard[dim + 1 :]] == rest for shard in shards)
        for dim, rest in enumerate(rests)
    )


def _find_line() -> str | None:
    """The program's line that is running; None if torch works on no data there."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_NO_DATA):
            return None
        if not file.startswith((TORCH_FOLDER, _OURS)):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return None
