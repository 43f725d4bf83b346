"""Which gradients the backward pass of a program computes: what autograd would walk through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor

from shardscope._torch.dispatch import is_overload
from shardscope._torch.programs import fake_mode_of, flatten, traced
from shardscope.parallel.flow import Flow, Move, Step, Value, map_nest, values_in

__all__ = ["Gradients"]


@final
class Gradients:
    """Between the trained parameters and the loss: the values that both reach.

    Whether an op passes a gradient on is asked of torch, once for all calls that are alike.
    """

    def __init__(self, flow: Flow) -> None:
        self._mode = fake_mode_of([value.example for value, _ in flow.inputs if value.is_tensor])
        self._is_open = bool(flow.sizes.known)
        self._known: dict[Any, tuple[bool, ...]] = {}
        self._trained = {
            value
            for value, role in flow.inputs
            if role.kind == "parameter" and value.example.requires_grad
        }
        self._below = self._trace_down(flow)
        self._above = self._trace_up(flow)

    def passes(self, step: Step | Move, position: int) -> bool:
        """Whether a gradient goes from the step to that one of its inputs."""
        return step.inputs[position] in self._below and self._is_asked(step, position)

    def _trace_down(self, flow: Flow) -> set[Value]:
        """What depends on trained parameters."""
        found = set(self._trained)
        for step in flow.steps:
            for position, value in enumerate(step.inputs):
                if value in found:
                    found.update(self._reached(step, position))
        return found

    def _trace_up(self, flow: Flow) -> set[Value]:
        """What the loss depends on."""
        losses = [item for item, role in flow.outputs if role.kind == "output"]
        self._above = set(values_in(losses[0])) if losses else set()
        for step in reversed(flow.steps):
            for position, value in enumerate(step.inputs):
                if value in self._below and self._is_asked(step, position):
                    self._above.add(value)
        return self._above

    def _is_asked(self, step: Step | Move, position: int) -> bool:
        return any(one in self._above for one in self._reached(step, position))

    def _reached(self, step: Step | Move, position: int) -> Iterator[Value]:
        """The results that are differentiable with respect to an input."""
        if not _is_number(step.inputs[position]):
            return iter(())
        results = [one for one in step.outputs if one.is_tensor]
        if isinstance(step, Move) or not is_overload(step.op):
            return (one for one in results if _is_number(one))
        passing = self._probe(step, position)
        return (one for one, passes in zip(results, passing, strict=True) if passes)

    def _probe(self, step: Step, position: int) -> tuple[bool, ...]:
        key = (step.op, position, tuple(one.dtype for one in step.inputs), len(step.outputs))
        if key not in self._known:
            # Asked without care, an op may fix sizes that the program leaves open.
            with traced(self._mode, has_open_sizes=self._is_open), torch.enable_grad():
                self._known[key] = _differentiate(step, position)
        return self._known[key]


def _differentiate(step: Step, position: int) -> tuple[bool, ...]:
    """Call the op on tensors without data, of which one wants a gradient."""
    chosen = iter(range(len(step.inputs)))

    def example(item: Any) -> Any:
        if not isinstance(item, Value) or not item.is_tensor:
            return item.example if isinstance(item, Value) else item
        alone = item.example.detach()
        return alone.requires_grad_() if next(chosen) == position else alone

    results = [one for one in step.outputs if one.is_tensor]
    try:
        made = step.op(**map_nest(step.arguments, example))
    except RuntimeError:  # what torch cannot differentiate, it will say where it is run
        return tuple(_is_number(one) for one in results)
    tensors = [one for one in flatten(made)[0] if isinstance(one, Tensor)]
    return tuple(one.requires_grad for one in tensors)


def _is_number(value: Value) -> bool:
    kind = value.dtype
    return kind is not None and (kind.is_floating_point or kind.is_complex)
