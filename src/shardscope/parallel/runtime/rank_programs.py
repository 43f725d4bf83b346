"""One rank's program in every form: FX graph, ExportedProgram, joint graph, module.

`RankPrograms` makes each form when it is asked for. `RankModule` is called as the model is;
`TrainingModule` returns the loss, and its gradients in `backward`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, final

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from shardscope._torch.dispatch import has_fake_tensors
from shardscope._torch.storage import scale_all
from shardscope._torch.tree import pytree_flatten
from shardscope.errors import ParallelError
from shardscope.parallel.ir.graph import ShardingGraph
from shardscope.parallel.ir.mesh import Mesh
from shardscope.parallel.ir.shard_spec import MeshCoordinate
from shardscope.parallel.passes import JointGraph, RankProgram
from shardscope.parallel.passes.backward import (
    move_to_cpu,
    relax_views,
    trace_joint,
    trained_parameters,
)
from shardscope.parallel.passes.collectives import DifferentiableEmitter, FunctionalEmitter
from shardscope.parallel.passes.exported import annotate, build_exported, local_state
from shardscope.parallel.passes.lower import lower_rank
from shardscope.parallel.passes.memory_use import measure_rank_memory
from shardscope.parallel.runtime.rank_function import Inputs, Results, State, write_function
from shardscope.record import RankMemory


@final
@dataclass(eq=False)
class RankPrograms:
    """Lowers a propagated graph for any rank of the mesh, and keeps what takes long to make.

    `source` is the single-device program that the graph was read from.
    """

    source: ExportedProgram
    graph: ShardingGraph
    mesh: Mesh
    is_training: bool
    _exported: dict[int, ExportedProgram] = field(default_factory=dict)  # by rank
    _joint: dict[int, JointGraph] = field(default_factory=dict)  # by rank
    _joint_by_key: dict[tuple[str, str], JointGraph] = field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the mesh, in row-major order."""
        return [self.mesh.rank_at(coordinate) for coordinate in self.mesh.coordinates]

    def forward(self, rank: int) -> RankProgram:
        """The rank's forward graph, which takes its state before its inputs."""
        coordinate = self.mesh.coordinate_of(rank)
        return lower_rank(
            self.graph,
            coordinate,
            lambda builder: FunctionalEmitter(builder, self.mesh, coordinate),
        )

    def exported(self, rank: int) -> ExportedProgram:
        """The rank's program with its shards of the state."""
        if rank not in self._exported:
            self._exported[rank] = build_exported(self.source, self.graph, self.forward(rank))
        return self._exported[rank]

    def joint(self, rank: int) -> JointGraph:
        """The rank's forward and backward program."""
        if rank not in self._joint:
            coordinate = self.mesh.coordinate_of(rank)
            forward = lower_rank(
                self.graph,
                coordinate,
                lambda builder: DifferentiableEmitter(builder, self.mesh, coordinate),
            )
            # Most ranks' graphs and shapes are equal, and tracing takes longest.
            shapes = [value.spec.local_shape(coordinate) for value, _ in self.graph.inputs]
            key = (str(forward.graph), str(shapes))
            if key not in self._joint_by_key:
                self._joint_by_key[key] = trace_joint(self.graph, forward)
            self._joint[rank] = self._joint_by_key[key]
        return self._joint[rank]

    def module(self, rank: int) -> RankModule | TrainingModule:
        """The rank's program as a module; trainable if it was partitioned for training."""
        coordinate = self.mesh.coordinate_of(rank)
        if not self.is_training:
            return RankModule(self.source, self.graph, self.exported(rank), coordinate)
        trained = trained_parameters(self.graph)
        state = local_state(self.source.state_dict, self.graph, coordinate, trained=trained)
        constants = local_state(self.source.constants, self.graph, coordinate)
        return TrainingModule(
            self.source, self.graph, self.joint(rank), coordinate, state, constants
        )

    def measure(self, ranks: tuple[int, ...]) -> RankMemory:
        """The memory of the first of these ranks, recorded for all of them."""
        coordinate, num_gradients = self.mesh.coordinate_of(ranks[0]), 0
        if self.is_training:
            joint = self.joint(ranks[0])
            graph, num_gradients = joint.graph_module.graph, len(joint.parameters)
        elif ranks[0] in self._exported:
            graph = self._exported[ranks[0]].graph
        else:
            program = self.forward(ranks[0])
            annotate(self.graph, program)
            graph = program.graph
        return measure_rank_memory(
            self.source, self.graph, coordinate, graph, ranks=ranks, num_gradients=num_gradients
        )

    # To be run in this process: on generated data on the CPU if tensors of the program have none.

    @cached_property
    def is_without_data(self) -> bool:
        """Whether a tensor of the program or of its example inputs is fake or meta."""
        tensors = [*self.source.state_dict.values(), *pytree_flatten(self.source.example_inputs)[0]]
        return any(is_without_data(tensor) for tensor in tensors)

    @cached_property
    def single_device(self) -> fx.GraphModule:
        """The single-device program, with reshape instead of view, so that any strides work."""
        graph = copy.deepcopy(self.source.graph)
        relax_views(graph)
        if self.is_without_data:
            move_to_cpu(graph)
        return fx.GraphModule(self.source.graph_module, graph)

    def runnable_forward(self, rank: int) -> RankProgram:
        """The rank's forward graph, to be run in this process."""
        program = self.forward(rank)
        if self.is_without_data:
            move_to_cpu(program.graph)
        return program

    def runnable_joint(self, rank: int) -> fx.GraphModule:
        """The rank's joint graph, to be run in this process."""
        joint = self.joint(rank).graph_module
        if not self.is_without_data:
            return joint
        graph = copy.deepcopy(joint.graph)
        move_to_cpu(graph)
        return fx.GraphModule(joint, graph)


def is_without_data(value: object) -> bool:
    """Whether it is a meta or fake tensor."""
    return isinstance(value, Tensor) and (value.is_meta or has_fake_tensors(value))


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
        self._program = _Program(
            self,
            source,
            graph,
            exported.graph_module,
            coordinate,
            exported.state_dict,
            exported.constants,
        )

    def forward(self, *args: object, **kwargs: object) -> object:
        """The model's output on this rank's inputs."""
        if not torch.is_grad_enabled():
            return self._program.call(args, kwargs)
        with torch.no_grad():
            return self._program.call(args, kwargs)


@final
class _Program:
    """What a call needs, in one attribute of the module: other names are the model's.

    `state` and `constants` are registered on `root`; the saved ones are in its state dict.
    """

    def __init__(
        self,
        root: nn.Module,
        source: ExportedProgram,
        graph: ShardingGraph,
        graph_module: fx.GraphModule,
        coordinate: MeshCoordinate,
        state: Mapping[str, object],
        constants: Mapping[str, object],
    ) -> None:
        roles = [role for _, role in graph.inputs]
        function = write_function(graph_module, is_input=[role.kind == "input" for role in roles])
        self.run = function.run
        self.inputs = Inputs(source, graph, coordinate)
        self.results = Results(source, graph)
        self.state = State(root, state, {**constants, **function.attributes})
        self.state_names = [role.name for role in roles if role.kind != "input"]
        self.state.set_order([*self.state_names, *function.attributes])

    def call(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """The model's output; mutated buffers and inputs are written back."""
        inputs = self.inputs.flatten_call(args, kwargs)
        state = self.state.values()
        return self.results.unflatten_results(self.run(state, inputs), state, inputs)


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
        state: Mapping[str, object],
        constants: Mapping[str, object],
    ) -> None:
        super().__init__()
        program = _Program(self, source, graph, joint.graph_module, coordinate, state, constants)
        self._program = _TrainingProgram(program, graph, joint)

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """The loss, to be differentiated."""
        program = self._program
        loss: Tensor = _Step.apply(program, args, kwargs, *program.parameters())  # type: ignore[no-untyped-call]
        return loss

    def train(self, mode: bool = True) -> TrainingModule:
        """Raise for `mode=False`: the mode is the one that the model was exported in."""
        if not mode:
            raise ParallelError(
                "a program for training has only one mode: dropout and norms are as they were "
                "exported. Partition the model again, in eval mode and without the loss."
            )
        return self

    @torch.no_grad()
    def step(self, *args: object, **kwargs: object) -> Tensor:
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
    """A program whose results are outputs, the loss among them, and then gradients."""

    def __init__(self, program: _Program, graph: ShardingGraph, joint: JointGraph) -> None:
        self._program = program
        self._num_outputs = joint.num_outputs
        self._loss = next(i for i, (_, role) in enumerate(graph.outputs) if role.kind == "output")
        self._trained = [program.state_names.index(name) for name in joint.parameters]

    def parameters(self) -> list[Tensor]:
        """The trained parameters, in the order of the gradients."""
        state = self._program.state.values()
        return [state[index] for index in self._trained]

    def run(
        self, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[Tensor, list[Tensor]]:
        """The loss and the gradients; buffers are updated."""
        leaves = self._program.inputs.flatten_call(args, kwargs)
        if any(isinstance(value, Tensor) and value.requires_grad for value in leaves):
            raise ParallelError(
                "an input requires a gradient, and this program computes only those of its "
                "parameters. Detach the input."
            )
        # The program was traced on contiguous inputs.
        inputs = [value.contiguous() if isinstance(value, Tensor) else value for value in leaves]
        state = self._program.state.values()
        results = self._program.run(state, inputs)
        self._program.results.write_back(results, state, leaves)
        return results[self._loss], list(results[self._num_outputs :])


class _StepContext(Protocol):
    """The context of `_Step`, which keeps the gradients until backward."""

    gradients: list[Tensor] | None


@final
class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _StepContext,
        program: _TrainingProgram,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        *parameters: Tensor,
    ) -> Tensor:
        loss, ctx.gradients = program.run(args, kwargs)
        return loss

    @staticmethod
    def backward(ctx: _StepContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
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
