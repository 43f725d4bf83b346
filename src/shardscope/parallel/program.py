"""A partitioned program: each rank's program on request, its collectives, memory and parity."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from shardscope._torch.export import flatten
from shardscope._torch.snapshot import preserved_random_state
from shardscope.errors import ParallelError
from shardscope.parallel.ir.graph import OpNode, Origin, Reshard, ShardingGraph
from shardscope.parallel.ir.mesh import Mesh, describe_axes
from shardscope.parallel.passes.backward import (
    JointGraph,
    differentiate,
    move_to_cpu,
    relax_views,
    trace_joint,
    trained_parameters,
)
from shardscope.parallel.passes.collectives import DifferentiableEmitter, FunctionalEmitter
from shardscope.parallel.passes.exported import annotate, build_exported, local_state
from shardscope.parallel.passes.grad_reduction import Gradients
from shardscope.parallel.passes.lower import RankProgram, lower_rank
from shardscope.parallel.passes.memory_use import measure_rank_memory
from shardscope.parallel.passes.propagate import Fallback
from shardscope.parallel.passes.schedule import trace_collectives
from shardscope.parallel.passes.schedule_check import group_ranks_by_shapes
from shardscope.parallel.plan.resolve import ResolvedPlan
from shardscope.parallel.records import (
    list_fallbacks,
    list_inserted,
    list_placed,
    make_recording,
    name_program,
)
from shardscope.parallel.runtime.module import RankModule, TrainingModule
from shardscope.parallel.verify.fidelity import check_export_fidelity
from shardscope.parallel.verify.first_divergence import find_first_divergence
from shardscope.parallel.verify.verify import (
    Trial,
    compare_ranks_with_single,
    divergence_error,
    is_without_data,
    materialize_inputs,
    ranks_by_group,
    run_captured,
    shard_values,
    unverifiable_reason,
)
from shardscope.record import FINE, Inserted, Parallelization, RankMemory, Recording, TensorVerdict

_MAX_REASON = 80  # characters of `not_verified` in the repr


@final
@dataclass(eq=False)
class ParallelProgram:
    """A program that was partitioned for a mesh; each rank's program is made on request.

    Examples:
        >>> program = parallelize(model, "tp=4", plan, args=(tokens,))
        >>> program.exported(3)
    """

    source: ExportedProgram
    graph: ShardingGraph
    mesh: Mesh
    plan: ResolvedPlan
    fallbacks: list[Fallback]
    is_training: bool = False
    original: Callable[[], nn.Module] | None = None  # a copy of the model itself
    verdicts: list[TensorVerdict] | None = None
    not_verified: str = ""
    _exported_by_rank: dict[int, ExportedProgram] = field(default_factory=dict)
    _joint_by_rank: dict[int, JointGraph] = field(default_factory=dict)
    _joint_by_key: dict[tuple[str, str], JointGraph] = field(
        default_factory=dict
    )  # by graph and shapes

    def exported(self, rank: int | None = None) -> ExportedProgram:
        """The program of a rank (default: this process's) with its shards of the state."""
        rank = self.mesh.own_rank() if rank is None else rank
        if rank not in self._exported_by_rank:
            self._exported_by_rank[rank] = build_exported(self.source, self.graph, self.write(rank))
        return self._exported_by_rank[rank]

    def module(self, rank: int | None = None) -> nn.Module:
        """The rank's program as a module; trainable if it was partitioned for training."""
        coordinate = self.mesh.coordinate_of(self.mesh.own_rank() if rank is None else rank)
        if not self.is_training:
            return RankModule(self.source, self.graph, self.exported(rank), coordinate)
        trained = trained_parameters(self.graph)
        state = local_state(self.source.state_dict, self.graph, coordinate, trained=trained)
        constants = local_state(self.source.constants, self.graph, coordinate)
        return TrainingModule(
            self.source, self.graph, self.joint(rank), coordinate, state, constants
        )

    def joint(self, rank: int | None = None) -> JointGraph:
        """The rank's forward and backward program."""
        rank = self.mesh.own_rank() if rank is None else rank
        if rank not in self._joint_by_rank:
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
            self._joint_by_rank[rank] = self._joint_by_key[key]
        return self._joint_by_rank[rank]

    def write(self, rank: int) -> RankProgram:
        """The rank's graph, without state."""
        coordinate = self.mesh.coordinate_of(rank)
        return lower_rank(
            self.graph,
            coordinate,
            lambda builder: FunctionalEmitter(builder, self.mesh, coordinate),
        )

    def __repr__(self) -> str:
        kinds = Counter(
            str(collective.kind)
            for collective in trace_collectives(self.graph, self.mesh.coordinates[0])
        )
        collectives = (
            ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no collectives"
        )
        name = name_program(self.graph) or "program"
        proof = self.not_verified[:_MAX_REASON] or (
            "not verified" if self.verdicts is None else "verified"
        )
        return (
            f"<ParallelProgram {name} on {describe_axes(self.mesh.axes)}: {collectives}, "
            f"{len(self.fallbacks)} fallbacks, {proof}>"
        )

    @property
    def moves(self) -> list[Reshard]:
        """Every reshard, in order."""
        return [op_node for op_node in self.graph.op_nodes if isinstance(op_node, Reshard)]

    @cached_property
    def collectives(self) -> list[Inserted]:
        """Every collective of this process's rank, in order, with its cause; backward ones too."""
        rank = self.mesh.own_rank()
        schedule = trace_collectives(
            self.graph, self.mesh.coordinate_of(rank), gradients=self.gradients
        )
        return list_inserted(schedule, self.graph, self.mesh, self.write(rank))

    @cached_property
    def _single_device(self) -> fx.GraphModule:
        """The single-device program, with reshape instead of view, so that any strides work."""
        graph = copy.deepcopy(self.source.graph)
        relax_views(graph)
        if self._is_without_data:
            move_to_cpu(graph)
        return fx.GraphModule(self.source.graph_module, graph)

    @cached_property
    def _is_without_data(self) -> bool:
        """Whether it is verified on generated data on the CPU, because a tensor is fake or meta."""
        tensors = [*self.source.state_dict.values(), *flatten(self.source.example_inputs)[0]]
        return any(is_without_data(tensor) for tensor in tensors)

    def _runnable_program(self, rank: int) -> RankProgram:
        program = self.write(rank)
        if self._is_without_data:
            move_to_cpu(program.graph)
        return program

    def _runnable_joint(self, rank: int) -> fx.GraphModule:
        joint = self.joint(rank).graph_module
        if not self._is_without_data:
            return joint
        graph = copy.deepcopy(joint.graph)
        move_to_cpu(graph)
        return fx.GraphModule(joint, graph)

    @cached_property
    def placements(self) -> dict[str, tuple[str, ...]]:
        """The placements of every tensor, by the names of nodes in the ranks' programs."""
        placements_by_node: dict[str, tuple[str, ...]] = {}
        for value, node in self.write(self.mesh.own_rank()).nodes.items():
            if value.is_tensor and isinstance(node, fx.Node):
                placements_by_node.setdefault(node.name, tuple(map(str, value.placements)))
        return placements_by_node

    @cached_property
    def gradients(self) -> Gradients | None:
        """The values that the backward pass differentiates; None without a backward pass."""
        return Gradients(self.graph) if self.is_training else None

    def memory(self, rank: int | None = None) -> RankMemory:
        """The memory of a rank (default: this process's) at the sizes of the example inputs."""
        rank = self.mesh.own_rank() if rank is None else rank
        return self._measure((rank,))

    def recording(self) -> Recording:
        """The program as a recording, for `show` and `save`."""
        not_requested = (
            "" if self.verdicts is not None else "verification was turned off (verify=False)"
        )
        parallelization = Parallelization(
            program=name_program(self.graph),
            axes=self.mesh.records,
            is_training=self.is_training,
            num_ops=sum(isinstance(op_node, OpNode) for op_node in self.graph.op_nodes),
            inserted=tuple(self.collectives),
            fallbacks=tuple(list_fallbacks(self.fallbacks, self.mesh)),
            placed=tuple(list_placed(self.graph, self.plan, self.mesh.coordinates[0])),
            rank_memory=tuple(self.measure_ranks()),
            verdicts=tuple(self.verdicts or ()),
            unverified=self.not_verified or not_requested,
        )
        return make_recording(parallelization, self.mesh)

    def measure_ranks(self) -> list[RankMemory]:
        """The memory of all ranks, those with equal shapes in one record."""
        return [self._measure(ranks) for ranks in group_ranks_by_shapes(self.graph, self.mesh)]

    def _measure(self, ranks: tuple[int, ...]) -> RankMemory:
        coordinate, joint = self.mesh.coordinate_of(ranks[0]), None
        if self.is_training:
            joint = self.joint(ranks[0])
            graph = joint.graph_module.graph
        elif ranks[0] in self._exported_by_rank:
            graph = self._exported_by_rank[ranks[0]].graph
        else:
            program = self.write(ranks[0])
            annotate(self.graph, program)
            graph = program.graph
        num_gradients = 0 if joint is None else len(joint.parameters)
        return measure_rank_memory(
            self.source, self.graph, coordinate, graph, ranks=ranks, num_gradients=num_gradients
        )

    def verify(self, *args: Any, **kwargs: Any) -> list[TensorVerdict]:
        """Run all ranks in this process, compare with the single device, raise if they differ.

        Without arguments, on the inputs that the program was exported with. If that is impossible,
        `not_verified` has the reason.
        """
        example = (args, kwargs) if args or kwargs else self.source.example_inputs
        self.not_verified = unverifiable_reason(self.source, self.mesh, example)
        if self.not_verified:
            return []
        values, trial = self._values(example), self.make_trial()
        self._check_export(example, trial, values)
        self.verdicts = compare_ranks_with_single(trial, values)
        wrong = [verdict for verdict in self.verdicts if verdict.agreement not in FINE]
        if wrong:
            raise divergence_error(wrong, self.find_first_divergence(values))
        return self.verdicts

    def _check_export(self, example: Any, trial: Trial, values: Sequence[Any]) -> None:
        """Compare the exported program with the model itself, if it is known and has data."""
        tensors = [*flatten(example)[0], *self.source.state_dict.values()]
        if self.original is None or any(is_without_data(tensor) for tensor in tensors):
            return
        with preserved_random_state():
            check_export_fidelity(
                self.original,
                self.graph,
                example,
                trial.gradients,
                lambda: run_captured(trial, values),
            )

    def _values(self, example: Any) -> list[Any]:
        """The arguments of the program, state and inputs, with generated data for fake tensors."""
        inputs = flatten(example)[0]
        num_wanted = sum(role.kind == "input" for _, role in self.graph.inputs)
        if len(inputs) != num_wanted:
            raise ParallelError(
                f"the program takes {num_wanted} inputs, and {len(inputs)} were given. Give those "
                "that it was exported with: the model's, then the targets of the loss."
            )
        leaves = iter(inputs)
        state = {**self.source.constants, **self.source.state_dict}
        values = [
            next(leaves) if role.kind == "input" else state[role.name]
            for _, role in self.graph.inputs
        ]
        return materialize_inputs(values)

    def find_first_divergence(self, values: Sequence[Any]) -> Origin | None:
        """The origin of the first value of the forward pass that differs on the ranks."""
        mesh = self.mesh
        ranks = {
            mesh.rank_at(coordinate): self._runnable_program(mesh.rank_at(coordinate))
            for coordinate in mesh.coordinates
        }
        with preserved_random_state(), torch.no_grad():
            return find_first_divergence(
                self.graph,
                mesh,
                self._single_device,
                ranks,
                values,
                shard_values(self.graph, mesh, values),
                ranks_by_group(mesh),
            )

    def forward(self, rank: int | None = None) -> fx.GraphModule:
        """The rank's forward graph, which takes its state before its inputs."""
        rank = self.mesh.own_rank() if rank is None else rank
        return fx.GraphModule(nn.Module(), self.write(rank).graph)

    def make_trial(
        self, names: Sequence[str | None] | None = None, *, is_run: bool = True
    ) -> Trial:
        """The programs to run (none unless `is_run`) and compare; `names` are for the outputs."""
        output_names = None if names is None else tuple(names)
        ranks = (
            [self.mesh.rank_at(coordinate) for coordinate in self.mesh.coordinates]
            if is_run
            else []
        )
        single = fx.Interpreter(self._single_device).run
        if not self.is_training:
            graphs = {r: self._runnable_program(r).as_module() for r in ranks}
            return Trial(self.graph, self.mesh, single, graphs, names=output_names)
        return Trial(
            self.graph,
            self.mesh,
            differentiate(self.graph, single),
            {rank: self._runnable_joint(rank) for rank in ranks},
            tuple(trained_parameters(self.graph)),
            output_names,
        )
