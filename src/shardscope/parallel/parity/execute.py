"""One run of a model, on a single device or as one rank, and what it gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.modules import named_places, own_buffers, own_parameters
from shardscope.errors import ParityError
from shardscope.parallel.parity.names import OriginalNames
from shardscope.parallel.parity.outcome import Outcome, named_tensors
from shardscope.parallel.parity.task import Task, call_model, default_loss
from shardscope.record import Source, TensorKind

__all__ = ["GatherFull", "Probe", "execute", "named_buffers", "named_parameters"]

Tensors = dict[str, torch.Tensor]
GatherFull = Callable[[TensorKind, Tensors], Tensors]
"""Makes full tensors of a rank's shards; all ranks call it with theirs, in the same order."""

_SEPARATOR = "\0"  # in no path


def _as_they_are(_: TensorKind, tensors: Tensors) -> Tensors:
    return tensors


class Probe(Protocol):
    """Records what modules or ops compute while a step runs."""

    def watching(self, model: nn.Module, names: OriginalNames) -> AbstractContextManager[None]:
        """Record until the context ends."""

    @property
    def seen(self) -> dict[str, torch.Tensor]:
        """What was recorded."""

    @property
    def sources(self) -> dict[str, Source]:
        """The lines behind it, where they are known."""

    @property
    def numbers(self) -> dict[str, dict[str, float]]:
        """The numbers that ops were called with."""


def execute(
    model: nn.Module,
    task: Task,
    *,
    names: OriginalNames | None = None,
    gather: GatherFull = _as_they_are,
    probe: Probe | None = None,
) -> Outcome:
    """Run one step of `model`, which changes it; the caller seeds the random numbers.

    `names` are the original's, for a model that was sharded.
    """
    names = OriginalNames(model) if names is None else names
    before = {name: _local(buffer).clone() for name, buffer in names.buffers(model)}
    inputs = task.copy_inputs()
    with ExitStack() as stack:
        calls = stack.enter_context(_caught_outputs(model, names))
        if probe is not None:
            stack.enter_context(probe.watching(model, names))
        if task.step is not None:
            task.step(model, inputs)
        else:
            _step(model, inputs, task)
    gradients = {name: parameter.grad for name, parameter in names.parameters(model)}
    gradients |= {f"inputs{place}": tensor.grad for place, tensor in named_tensors(inputs)}
    buffers = dict(names.buffers(model))
    changed = {
        name
        for name, buffer in buffers.items()
        if name not in before or not _is_same(before[name], _local(buffer))
    }
    outputs = {
        f"{call}{_SEPARATOR}{path}": tensor
        for call, output in enumerate(calls)
        for path, tensor in named_tensors(output)
    }
    present = {
        name: _densify(gradient) for name, gradient in gradients.items() if gradient is not None
    }
    return Outcome(
        [
            (name.partition(_SEPARATOR)[2], _detach(tensor))
            for name, tensor in gather(TensorKind.OUTPUT, outputs).items()
        ],
        gather(TensorKind.GRADIENT, present),
        {
            name: _detach(buffer).clone()
            for name, buffer in gather(TensorKind.BUFFER, buffers).items()
        },
        frozenset(changed),
        num_calls=len(calls),
        seen={} if probe is None else probe.seen,
        sources={} if probe is None else probe.sources,
        numbers={} if probe is None else probe.numbers,
    )


def _step(model: nn.Module, inputs: Any, task: Task) -> None:
    output = call_model(model, inputs)
    if not task.has_backward:
        return
    losses = default_loss(output) if task.loss is None else [_find_loss(task, output)]
    losses = [one * task.loss_scale if task.loss_scale != 1.0 else one for one in losses]
    losses = [one for one in losses if one.requires_grad]
    if losses:
        torch.autograd.backward(losses)


def _find_loss(task: Task, output: Any) -> torch.Tensor:
    assert task.loss is not None
    loss = task.loss(output)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        kind = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else loss
        raise ParityError(
            f"loss returned {kind!s:.80}, but backward starts at a tensor with one element. Return "
            "the loss as a scalar tensor."
        )
    return loss


@contextmanager
def _caught_outputs(model: nn.Module, names: OriginalNames) -> Iterator[list[Any]]:
    """What the model returns in each of its calls, also where a user's step does not return it.

    A step may call what a wrapper such as DDP is around; a wrapper's call is its own, though.
    """
    outputs: list[Any] = []
    depth = 0

    def enter(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1
        if not depth and not is_in_backward():  # which calls a checkpointed model once more
            outputs.append(output)

    handles = []
    for name, module in names.modules(model):
        if not name:
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def named_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter under each of its clean names."""
    for place, module in named_places(model):
        for name, parameter in own_parameters(module):
            yield f"{place}.{name}".lstrip("."), parameter


def named_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The same for buffers."""
    for place, module in named_places(model):
        for name, buffer in own_buffers(module):
            yield f"{place}.{name}".lstrip("."), buffer


def _local(tensor: torch.Tensor) -> torch.Tensor:
    to_local = getattr(tensor, "to_local", None)
    return tensor.detach() if to_local is None else to_local().detach()


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    # A NaN that stays is no change.
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _detach(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.wait() if hasattr(tensor, "wait") else tensor


def _densify(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor
