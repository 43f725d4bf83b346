"""Observes the calls of the model in a step: what it gets and returns, and the backward passes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

import torch
from torch import nn

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.storage import is_transformed
from shardscope.attribution.call_sites import read_stack
from shardscope.parallel.equivalence.names import OriginalNames, named_tensors
from shardscope.parallel.equivalence.step_result import local_of
from shardscope.parallel.equivalence.training import TrainingRecorder
from shardscope.record import Source


@final
class BackwardCounter:
    """Counts the backward passes of a step, and the times gradients were cleared before one."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.count = 0
        self.num_cleared = 0
        self._parameters = [p for p in parameters if p.requires_grad and p.is_leaf]
        self._has_gradients = False  # since gradients were last cleared, a backward has run
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._accumulate)  # type: ignore[no-untyped-call]
            for parameter in self._parameters
        ]

    def remove(self) -> None:
        """Stop counting."""
        for hook in self._hooks:
            hook.remove()

    def register(self, output: object) -> None:
        """Count the backward pass that starts at an output of the model."""
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

    def _accumulate(self, parameter: torch.Tensor) -> None:
        # A hook of the program may have moved the gradient into its own buffer already.
        self._has_gradients |= parameter.grad is not None


def is_cleared(gradients: Iterable[torch.Tensor | None]) -> bool:
    """Whether no gradient is left, as after `zero_grad()`: all are None or zero."""
    return not any(gradient is not None and local_of(gradient).any() for gradient in gradients)


@final
@dataclass(eq=False)
class ModelCalls:
    """What the model returns in each call, its inputs in all calls, and the line of the first.

    What it returns without gradients, after an optimizer has stepped, is an evaluation.
    """

    results: list[object] = field(default_factory=list)
    evaluations: list[object] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)
    source: Source | None = None
    num_transformed: int = 0  # calls in a transform of torch.func, such as vmap


@contextmanager
def captured_outputs(
    model: nn.Module,
    names: OriginalNames,
    backwards: BackwardCounter,
    recorder: TrainingRecorder | None,
) -> Iterator[ModelCalls]:
    """Collect what the model gets and returns in each call, also if the step does not return it.

    A step may call the module inside a wrapper such as DDP; a call of the wrapper counts once.
    """
    outputs = ModelCalls()
    depth = 0

    def enter(_: nn.Module, args: object, kwargs: object) -> None:
        nonlocal depth
        depth += 1
        if depth == 1 and not is_in_backward():
            tensors = [tensor for _, tensor in named_tensors((args, kwargs))]
            outputs.inputs += [local_of(t).clone() for t in tensors if not is_transformed(t)]
            outputs.source = outputs.source or read_stack(sys._getframe(1)).source

    def leave(_: nn.Module, __: object, output: object) -> None:
        nonlocal depth
        depth -= 1
        if depth or is_in_backward():  # backward calls a checkpointed model again
            return
        if any(is_transformed(tensor) for _, tensor in named_tensors(output)):
            outputs.num_transformed += 1
        else:
            is_updated = recorder is not None and recorder.is_updated
            is_evaluation = is_updated and not torch.is_grad_enabled()
            (outputs.evaluations if is_evaluation else outputs.results).append(output)
            backwards.register(output)

    handles = []
    for name, module in names.modules(model):
        if not name:
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
