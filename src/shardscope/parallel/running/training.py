"""One rank's share of a model, trained by its joint program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from shardscope._torch.scaling import scale_all
from shardscope.errors import ParallelError
from shardscope.parallel.flow import Flow
from shardscope.parallel.joint import JointGraph
from shardscope.parallel.layouts import Seat
from shardscope.parallel.running.function import write_function
from shardscope.parallel.running.inputs import Inputs
from shardscope.parallel.running.results import Results
from shardscope.parallel.running.state import State

__all__ = ["TrainingModule"]


@final
class TrainingModule(nn.Module):
    """Holds one rank's parameters and buffers under the model's names; a call is a loss.

    `loss = module(*inputs)` then `loss.backward()`, as for any module: the gradients are found
    with the loss and handed over in backward. `step(*inputs)` does both at once, and is faster.
    """

    def __init__(
        self,
        source: ExportedProgram,
        flow: Flow,
        joint: JointGraph,
        seat: Seat,
        state: Mapping[str, Any],
        constants: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self._program = _Program(self, source, flow, joint, seat, state, constants)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The loss, to be differentiated."""
        program = self._program
        return _Step.apply(program, args, kwargs, *program.parameters())  # type: ignore[no-untyped-call]

    def train(self, mode: bool = True) -> TrainingModule:
        """The program is as the model was when it was exported; that is not changed any more."""
        if not mode:
            raise ParallelError(
                "a program for training has only one mode: dropout and norms are as they were "
                "exported. Partition the model again, in eval mode and without the loss."
            )
        return self

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss; gradients are added to the parameters'."""
        loss, gradients = self._program.run(args, kwargs)
        # From the end, each let go once it is added.
        for parameter in reversed(self._program.parameters()):
            if parameter.grad is None:
                parameter.grad = gradients.pop()
            else:
                parameter.grad.add_(gradients.pop())
        return loss


@final
class _Program:
    """All that a step needs, under one name of the module: the others are the model's."""

    def __init__(
        self,
        root: nn.Module,
        source: ExportedProgram,
        flow: Flow,
        joint: JointGraph,
        seat: Seat,
        state: Mapping[str, Any],
        constants: Mapping[str, Any],
    ) -> None:
        roles = [role for _, role in flow.inputs]
        graph = joint.graph_module
        function = write_function(graph, is_input=[one.kind == "input" for one in roles])
        self._run = function.run
        self._inputs = Inputs(source, flow, seat)
        self._results = Results(source, flow)
        self._num_outputs = joint.num_outputs
        self._loss = next(i for i, (_, one) in enumerate(flow.outputs) if one.kind == "output")
        self._state = State(root, state, {**constants, **function.attributes})
        names = [role.name for role in roles if role.kind != "input"]
        self._state.arrange([*names, *function.attributes])
        self._trained = [names.index(name) for name in joint.parameters]

    def parameters(self) -> list[Tensor]:
        """Those that have gradients, in the order of the gradients."""
        state = self._state.values()
        return [state[index] for index in self._trained]

    def run(self, args: Any, kwargs: Any) -> tuple[Tensor, list[Tensor]]:
        """The loss and the gradients; buffers take their new values."""
        given = self._inputs.take(args, kwargs)
        if any(isinstance(one, Tensor) and one.requires_grad for one in given):
            raise ParallelError(
                "an input requires a gradient, and this program computes only those of its "
                "parameters. Detach the input."
            )
        # The program was traced on inputs without gaps.
        inputs = [one.contiguous() if isinstance(one, Tensor) else one for one in given]
        state = self._state.values()
        results = self._run(state, inputs)
        self._results.write_back(results, state, given)
        return results[self._loss], list(results[self._num_outputs :])


@final
class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, program: _Program, args: Any, kwargs: Any, *parameters: Tensor) -> Tensor:
        loss, ctx.gradients = program.run(args, kwargs)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise ParallelError(
                "backward was already run on this loss, whose gradients are returned once. "
                "Call the module again for another backward."
            )
        if not _is_one(gradient):
            scale_all(gradients, gradient)
        return None, None, None, *gradients


def _is_one(gradient: Tensor) -> bool:
    """Whether it is known to be 1: of a tensor on a device, to ask would mean to wait for it."""
    return type(gradient) is Tensor and gradient.is_cpu and gradient.item() == 1
