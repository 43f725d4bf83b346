"""One run of a model, on a single device or as one rank, and what it gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from shardscope._torch.modules import named_places, own_buffers, own_parameters
from shardscope.errors import ParityError
from shardscope.parallel.parity.outcome import Outcome, named_tensors
from shardscope.parallel.parity.task import Task, call_model, default_loss
from shardscope.record import Source, TensorKind

__all__ = ["Probe", "Whole", "execute", "named_buffers", "named_parameters"]

Tensors = dict[str, torch.Tensor]
Whole = Callable[[TensorKind, Tensors], Tensors]
"""Makes whole tensors of a rank's pieces; all ranks call it with theirs, in the same order."""


def _as_they_are(_: TensorKind, tensors: Tensors) -> Tensors:
    return tensors


class Probe(Protocol):
    """Someone who looks at modules while they run."""

    def watching(self, model: nn.Module) -> AbstractContextManager[None]:
        """Look, until the context ends."""

    @property
    def seen(self) -> dict[str, torch.Tensor]:
        """What was seen."""

    @property
    def sources(self) -> dict[str, Source]:
        """The lines behind it, where they are known."""


def execute(
    model: nn.Module, task: Task, *, whole: Whole = _as_they_are, probe: Probe | None = None
) -> Outcome:
    """Run one step of `model`, which it changes; the caller sees to random numbers."""
    before = {name: _local(one).clone() for name, one in named_buffers(model)}
    inputs = task.copy_inputs()
    with ExitStack() as stack:
        outputs = stack.enter_context(_caught_outputs(model))
        if probe is not None:
            stack.enter_context(probe.watching(model))
        if task.step is not None:
            task.step(model, inputs)
        else:
            _step(model, inputs, task)
    gradients = {name: one.grad for name, one in named_parameters(model)}
    gradients |= {f"inputs{place}": one.grad for place, one in named_tensors(inputs)}
    buffers = dict(named_buffers(model))
    changed = {
        name
        for name, one in buffers.items()
        if name not in before or not _is_same(before[name], _local(one))
    }
    found = dict(named_tensors(outputs[-1] if outputs else ()))
    present = {name: _densify(one) for name, one in gradients.items() if one is not None}
    return Outcome(
        [(name, _detach(one)) for name, one in whole(TensorKind.OUTPUT, found).items()],
        whole(TensorKind.GRADIENT, present),
        {name: _detach(one).clone() for name, one in whole(TensorKind.BUFFER, buffers).items()},
        frozenset(changed),
        seen={} if probe is None else probe.seen,
        sources={} if probe is None else probe.sources,
    )


def _step(model: nn.Module, inputs: Any, task: Task) -> None:
    output = call_model(model, inputs)
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
            f"loss returned {kind!s:.80}, and a backward begins at one number. Return that."
        )
    return loss


@contextmanager
def _caught_outputs(model: nn.Module) -> Iterator[list[Any]]:
    """What the model returns each time it is called; a user's step may keep it to itself."""
    outputs: list[Any] = []
    handle = model.register_forward_hook(lambda _, __, output: outputs.append(output))
    try:
        yield outputs
    finally:
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
