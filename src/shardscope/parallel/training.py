"""One rank's share of a model, trained by its joint program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from shardscope._torch.programs import flatten
from shardscope.errors import ParallelError
from shardscope.parallel.flow import Flow
from shardscope.parallel.joint import JointGraph

__all__ = ["TrainingModule"]


@final
class TrainingModule(nn.Module):
    """Holds one rank's parameters and buffers under the model's names; a call is a loss.

    `loss = module(*inputs)` then `loss.backward()`, as for any module: the gradients are found
    with the loss and handed over in backward. `step(*inputs)` does both at once, and is faster.
    """

    def __init__(
        self,
        flow: Flow,
        joint: JointGraph,
        state: Mapping[str, Any],
        constants: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self._graph = joint.graph_module
        self._roles = [role for _, role in flow.inputs]
        self._output_roles = [role for _, role in flow.outputs]
        self._loss = next(i for i, one in enumerate(self._output_roles) if one.kind == "output")
        self._trained = joint.parameters
        self._tensors = {**constants, **state}
        for name, tensor in self._tensors.items():
            if isinstance(tensor, Tensor):
                _attach(self, name, tensor, is_saved=name in state)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The loss, to be differentiated."""
        values = self._values(args, kwargs)
        parameters = [self._tensors[name] for name in self._trained]
        return _Step.apply(self, values, *parameters)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss; gradients are added to the parameters'."""
        results = self.run(self._values(args, kwargs))
        for name, gradient in zip(self._trained, results[len(self._output_roles) :], strict=True):
            parameter = self._tensors[name]
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        loss: Tensor = results[self._loss]
        return loss

    def run(self, values: Sequence[Any]) -> Sequence[Any]:
        """The joint program's results; buffers take their new values."""
        results: Sequence[Any] = self._graph(*values)
        for result, role in zip(results, self._output_roles, strict=False):
            if role.kind == "mutation":
                self._tensors[role.name].copy_(result)
        return results

    def split(self, results: Sequence[Any]) -> tuple[Tensor, Sequence[Tensor]]:
        """The loss, and the gradients of the trained parameters."""
        return results[self._loss], results[len(self._output_roles) :]

    def _values(self, args: Any, kwargs: Any) -> list[Any]:
        leaves = flatten((args, kwargs))[0]
        num_wanted = sum(role.kind == "input" for role in self._roles)
        if len(leaves) != num_wanted:
            raise ParallelError(
                f"the program takes {num_wanted} inputs and was given {len(leaves)}. Call it as "
                "the model was exported: its inputs, then the targets of the loss."
            )
        given = iter(leaves)
        return [
            next(given) if role.kind == "input" else self._tensors[role.name]
            for role in self._roles
        ]


@final
class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: TrainingModule, values: Any, *parameters: Tensor) -> Tensor:
        loss, gradients = module.split(module.run(values))
        ctx.gradients = gradients
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, *(gradient * one for one in ctx.gradients)


def _attach(root: nn.Module, name: str, tensor: Tensor, *, is_saved: bool) -> None:
    """Register a tensor under its dotted name."""
    *path, last = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    if isinstance(tensor, nn.Parameter):
        root.register_parameter(last, tensor)
    else:
        root.register_buffer(last, tensor, persistent=is_saved)
