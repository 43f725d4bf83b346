"""One rank's program as a module: called as the model is, or trained by its joint graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from shardscope._torch.storage import scale_all
from shardscope.errors import ParallelError
from shardscope.parallel.ir.graph import ShardingGraph
from shardscope.parallel.ir.shard_spec import MeshCoordinate
from shardscope.parallel.passes.backward import JointGraph
from shardscope.parallel.runtime.codegen import write_function
from shardscope.parallel.runtime.io import Inputs, Results, State


@final
class RankModule(nn.Module):
    """Holds the rank's shards of parameters and buffers under the model's names.

    It computes no gradients, because those of a collective depend on how its result is used. A
    program that is partitioned for training has a `TrainingModule`.
    """

    def __init__(
        self,
        source: ExportedProgram,
        graph: ShardingGraph,
        exported: ExportedProgram,
        coordinate: MeshCoordinate,
    ) -> None:
        super().__init__()
        self._program = _Program(self, source, graph, exported, coordinate)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output on this rank's inputs."""
        if not torch.is_grad_enabled():
            return self._program.call(args, kwargs)
        with torch.no_grad():
            return self._program.call(args, kwargs)


@final
class _Program:
    """What a call needs, in one attribute of the module: other names are the model's."""

    def __init__(
        self,
        root: nn.Module,
        source: ExportedProgram,
        graph: ShardingGraph,
        exported: ExportedProgram,
        coordinate: MeshCoordinate,
    ) -> None:
        roles = [role for _, role in graph.inputs]
        graph_module = exported.graph_module
        function = write_function(graph_module, is_input=[role.kind == "input" for role in roles])
        self._run = function.run
        self._inputs = Inputs(source, graph, coordinate)
        self._results = Results(source, graph)
        self._state = State(
            root, exported.state_dict, {**exported.constants, **function.attributes}
        )
        names = [role.name for role in roles if role.kind != "input"]
        self._state.set_order([*names, *function.attributes])

    def call(self, args: Any, kwargs: Any) -> Any:
        inputs = self._inputs.flatten_call(args, kwargs)
        state = self._state.values()
        return self._results.unflatten_results(self._run(state, inputs), state, inputs)


@final
class TrainingModule(nn.Module):
    """Holds one rank's parameters and buffers under the model's names; a call returns the loss.

    `loss = module(*inputs)` then `loss.backward()`, as for any module: the gradients are
    computed with the loss and returned in backward. `step(*inputs)` does both, and is faster.
    """

    def __init__(
        self,
        source: ExportedProgram,
        graph: ShardingGraph,
        joint: JointGraph,
        coordinate: MeshCoordinate,
        state: Mapping[str, Any],
        constants: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self._program = _TrainingProgram(self, source, graph, joint, coordinate, state, constants)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The loss, to be differentiated."""
        program = self._program
        return _Step.apply(program, args, kwargs, *program.parameters())  # type: ignore[no-untyped-call]

    def train(self, mode: bool = True) -> TrainingModule:
        """Raise for `mode=False`: the mode is the one that the model was exported in."""
        if not mode:
            raise ParallelError(
                "a program for training has only one mode: dropout and norms are as they were "
                "exported. Partition the model again, in eval mode and without the loss."
            )
        return self

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the loss, and add the gradients to the parameters' `grad`."""
        loss, gradients = self._program.run(args, kwargs)
        # From the end, so that each is freed once it is added.
        for parameter in reversed(self._program.parameters()):
            if parameter.grad is None:
                parameter.grad = gradients.pop()
            else:
                parameter.grad.add_(gradients.pop())
        return loss


@final
class _TrainingProgram:
    """What a step needs, in one attribute of the module: other names are the model's."""

    def __init__(
        self,
        root: nn.Module,
        source: ExportedProgram,
        graph: ShardingGraph,
        joint: JointGraph,
        coordinate: MeshCoordinate,
        state: Mapping[str, Any],
        constants: Mapping[str, Any],
    ) -> None:
        roles = [role for _, role in graph.inputs]
        graph_module = joint.graph_module
        function = write_function(graph_module, is_input=[role.kind == "input" for role in roles])
        self._run = function.run
        self._inputs = Inputs(source, graph, coordinate)
        self._results = Results(source, graph)
        self._num_outputs = joint.num_outputs
        self._loss = next(i for i, (_, role) in enumerate(graph.outputs) if role.kind == "output")
        self._state = State(root, state, {**constants, **function.attributes})
        names = [role.name for role in roles if role.kind != "input"]
        self._state.set_order([*names, *function.attributes])
        self._trained = [names.index(name) for name in joint.parameters]

    def parameters(self) -> list[Tensor]:
        """The trained parameters, in the order of the gradients."""
        state = self._state.values()
        return [state[index] for index in self._trained]

    def run(self, args: Any, kwargs: Any) -> tuple[Tensor, list[Tensor]]:
        """The loss and the gradients; buffers are updated."""
        leaves = self._inputs.flatten_call(args, kwargs)
        if any(isinstance(value, Tensor) and value.requires_grad for value in leaves):
            raise ParallelError(
                "an input requires a gradient, and this program computes only those of its "
                "parameters. Detach the input."
            )
        # The program was traced on contiguous inputs.
        inputs = [value.contiguous() if isinstance(value, Tensor) else value for value in leaves]
        state = self._state.values()
        results = self._run(state, inputs)
        self._results.write_back(results, state, leaves)
        return results[self._loss], list(results[self._num_outputs :])


@final
class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, program: _TrainingProgram, args: Any, kwargs: Any, *parameters: Tensor
    ) -> Tensor:
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
        if not _is_unit_gradient(gradient):
            scale_all(gradients, gradient)
        return None, None, None, *gradients


def _is_unit_gradient(gradient: Tensor) -> bool:
    """Whether it is known to be 1, without synchronizing with a device."""
    return type(gradient) is Tensor and gradient.is_cpu and gradient.item() == 1
