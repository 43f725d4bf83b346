"""One run of a model, on a single device or as one rank, and its outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol, final

import torch
from torch import nn

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.modules import named_places, own_buffers, own_parameters
from shardscope.errors import ParityError
from shardscope.parallel.parity.names import OriginalNames
from shardscope.parallel.parity.outcome import Outcome, named_tensors
from shardscope.parallel.parity.task import Task, call_model, default_loss
from shardscope.record import Source, TensorKind

__all__ = [
    "GatherFull",
    "Probe",
    "execute",
    "is_cleared",
    "named_buffers",
    "named_parameters",
]

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
    backwards = _Backwards([parameter for _, parameter in names.parameters(model)])
    with ExitStack() as stack:
        calls = stack.enter_context(_caught_outputs(model, names, backwards))
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
        num_backwards=backwards.count,
        num_cleared=backwards.num_cleared,
        seen={} if probe is None else probe.seen,
        sources={} if probe is None else probe.sources,
        numbers={} if probe is None else probe.numbers,
    )


def _step(model: nn.Module, inputs: Any, task: Task) -> None:
    output = call_model(model, inputs)
    if not task.has_backward:
        return
    losses = default_loss(output) if task.loss is None else [_find_loss(task, output)]
    losses = [loss * task.loss_scale if task.loss_scale != 1.0 else loss for loss in losses]
    losses = [loss for loss in losses if loss.requires_grad]
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


@final
class _Backwards:
    """Counts the backward passes of a step, and those before which gradients were cleared."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.count = 0
        self.num_cleared = 0
        self._parameters = [p for p in parameters if p.requires_grad and p.is_leaf]
        self._has_gradients = False  # a backward has left some, since they were last cleared
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._accumulate)  # type: ignore[no-untyped-call]

    def watch(self, output: Any) -> None:
        """Count the backward pass that starts at what a call of the model returned."""
        is_counted = False

        def count(_: torch.Tensor) -> None:
            nonlocal is_counted
            if is_counted:
                return
            is_counted = True
            self.count += 1
            if self._has_gradients and is_cleared(p.grad for p in self._parameters):
                self.num_cleared += 1
                self._has_gradients = False

        for _, tensor in named_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(count)  # type: ignore[no-untyped-call]

    def _accumulate(self, _: torch.Tensor) -> None:
        self._has_gradients = True


def is_cleared(gradients: Iterable[torch.Tensor | None]) -> bool:
    """Whether no gradient is left, as after `zero_grad()`: all are None or zero."""
    return not any(gradient is not None and _local(gradient).any() for gradient in gradients)


@contextmanager
def _caught_outputs(
    model: nn.Module, names: OriginalNames, backwards: _Backwards
) -> Iterator[list[Any]]:
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
            backwards.watch(output)

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
    """Every buffer under each of its clean names."""
    for place, module in named_places(model):
        for name, buffer in own_buffers(module):
            yield f"{place}.{name}".lstrip("."), buffer


def _local(tensor: torch.Tensor) -> torch.Tensor:
    to_local = getattr(tensor, "to_local", None)
    return tensor.detach() if to_local is None else to_local().detach()


def _is_same(before: torch.Tensor, after: torch.Tensor) -> bool:
    if before.shape != after.shape:
        return False
    # A NaN that stays NaN is not a change.
    return bool(((before == after) | ((before != before) & (after != after))).all())


def _detach(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.wait() if hasattr(tensor, "wait") else tensor


def _densify(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor
