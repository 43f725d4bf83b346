"""The programs of the ranks, made when they are asked for: forward, exported, joint, as modules."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

from torch import Tensor, fx
from torch.export import ExportedProgram

from shardscope._torch.dispatch import has_fake_tensors
from shardscope._torch.export import flatten
from shardscope.parallel.ir.graph import ShardingGraph
from shardscope.parallel.ir.mesh import Mesh
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
from shardscope.parallel.runtime.module import RankModule, TrainingModule
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
        tensors = [*self.source.state_dict.values(), *flatten(self.source.example_inputs)[0]]
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
