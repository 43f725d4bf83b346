"""A program for each rank, and what is known of it."""

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

from shardscope._torch.programs import flatten
from shardscope._torch.random_state import preserved_random_state
from shardscope.errors import ParallelError
from shardscope.parallel.culprit import find_culprit
from shardscope.parallel.exported import annotate, build_exported, local_state
from shardscope.parallel.faithful import check_faithful
from shardscope.parallel.flow import Flow, Move, Origin, Step
from shardscope.parallel.gradients import Gradients
from shardscope.parallel.holdings import hold_memory
from shardscope.parallel.joint import JointGraph, differentiate, trace_joint, trained_parameters
from shardscope.parallel.mesh import Mesh, describe_axes
from shardscope.parallel.order import ranks_alike
from shardscope.parallel.partition import RankProgram, write_rank
from shardscope.parallel.plan.resolved import Resolved
from shardscope.parallel.propagate import Fallback
from shardscope.parallel.records import (
    list_fallbacks,
    list_inserted,
    list_placed,
    make_recording,
    name_program,
)
from shardscope.parallel.running.module import RankModule
from shardscope.parallel.running.training import TrainingModule
from shardscope.parallel.talk import listen
from shardscope.parallel.tidy import move_to_cpu, relax_views
from shardscope.parallel.verdicts import fill, has_no_data, refuse, why_not
from shardscope.parallel.verify import Trial, deal_values, groups_of, prove, run_captured
from shardscope.parallel.wires import FunctionalWire, TrainingWire
from shardscope.record import FINE, Inserted, Parallelization, RankMemory, Recording, TensorVerdict

__all__ = ["ParallelProgram"]

_MAX_REASON = 80  # characters of why it was not verified


@final
@dataclass(eq=False)
class ParallelProgram:
    """A program that was partitioned for a mesh; each rank's program is made on request.

    Examples:
        >>> program = parallelize(model, "tp=4", plan, args=(tokens,))
        >>> program.exported(3)
    """

    source: ExportedProgram
    flow: Flow
    mesh: Mesh
    plan: Resolved
    fallbacks: list[Fallback]
    is_training: bool = False
    original: Callable[[], nn.Module] | None = None  # a copy of the model itself
    verdicts: list[TensorVerdict] | None = None
    not_verified: str = ""
    _written: dict[int, ExportedProgram] = field(default_factory=dict)
    _joints: dict[int, JointGraph] = field(default_factory=dict)
    _traced: dict[tuple[str, str], JointGraph] = field(default_factory=dict)  # by graph and shapes

    def exported(self, rank: int | None = None) -> ExportedProgram:
        """The program of a rank (this process's, if not said) with its share of the state."""
        rank = self.mesh.own_rank() if rank is None else rank
        if rank not in self._written:
            self._written[rank] = build_exported(self.source, self.flow, self.write(rank))
        return self._written[rank]

    def module(self, rank: int | None = None) -> nn.Module:
        """The rank's program to call; one that can be trained if the program was made for that."""
        seat = self.mesh.seat_of(self.mesh.own_rank() if rank is None else rank)
        if not self.is_training:
            return RankModule(self.source, self.flow, self.exported(rank), seat)
        trained = trained_parameters(self.flow)
        state = local_state(self.source.state_dict, self.flow, seat, trained=trained)
        constants = local_state(self.source.constants, self.flow, seat)
        return TrainingModule(self.source, self.flow, self.joint(rank), seat, state, constants)

    def joint(self, rank: int | None = None) -> JointGraph:
        """The rank's forward and backward program."""
        rank = self.mesh.own_rank() if rank is None else rank
        if rank not in self._joints:
            seat = self.mesh.seat_of(rank)
            written = write_rank(self.flow, seat, lambda pen: TrainingWire(pen, self.mesh, seat))
            # Most ranks' programs are the same but for what they hold, and tracing takes longest.
            shapes = [value.layout.local_shape(seat) for value, _ in self.flow.inputs]
            key = (str(written.graph), str(shapes))
            if key not in self._traced:
                self._traced[key] = trace_joint(self.flow, written)
            self._joints[rank] = self._traced[key]
        return self._joints[rank]

    def write(self, rank: int) -> RankProgram:
        """The rank's graph, without state."""
        seat = self.mesh.seat_of(rank)
        return write_rank(self.flow, seat, lambda pen: FunctionalWire(pen, self.mesh, seat))

    def __repr__(self) -> str:
        kinds = Counter(str(one.kind) for one in listen(self.flow, self.mesh.seats[0]))
        spoken = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no collectives"
        name = name_program(self.flow) or "program"
        proof = self.not_verified[:_MAX_REASON] or (
            "not verified" if self.verdicts is None else "verified"
        )
        return (
            f"<ParallelProgram {name} on {describe_axes(self.mesh.axes)}: {spoken}, "
            f"{len(self.fallbacks)} fallbacks, {proof}>"
        )

    @property
    def moves(self) -> list[Move]:
        """Every change of a placement, in order."""
        return [step for step in self.flow.steps if isinstance(step, Move)]

    @cached_property
    def collectives(self) -> list[Inserted]:
        """Every collective of this process's rank, in order, with its cause; backward ones too."""
        rank = self.mesh.own_rank()
        said = listen(self.flow, self.mesh.seat_of(rank), gradients=self.gradients)
        return list_inserted(said, self.flow, self.mesh, self.write(rank))

    @cached_property
    def _single(self) -> fx.GraphModule:
        """The program for one device, to run on any strides."""
        graph = copy.deepcopy(self.source.graph)
        relax_views(graph)
        if self._has_no_data:
            move_to_cpu(graph)
        return fx.GraphModule(self.source.graph_module, graph)

    @cached_property
    def _has_no_data(self) -> bool:
        """Whether it is verified on numbers that are made up, on the CPU."""
        given = [*self.source.state_dict.values(), *flatten(self.source.example_inputs)[0]]
        return any(has_no_data(one) for one in given)

    def _write_to_run(self, rank: int) -> RankProgram:
        written = self.write(rank)
        if self._has_no_data:
            move_to_cpu(written.graph)
        return written

    def _joint_to_run(self, rank: int) -> fx.GraphModule:
        joint = self.joint(rank).graph_module
        if not self._has_no_data:
            return joint
        graph = copy.deepcopy(joint.graph)
        move_to_cpu(graph)
        return fx.GraphModule(joint, graph)

    @cached_property
    def placements(self) -> dict[str, tuple[str, ...]]:
        """How every tensor lies along each axis, by the names of nodes in the ranks' programs."""
        found: dict[str, tuple[str, ...]] = {}
        for value, node in self.write(self.mesh.own_rank()).nodes.items():
            if value.is_tensor and isinstance(node, fx.Node):
                found.setdefault(node.name, tuple(map(str, value.placements)))
        return found

    @cached_property
    def gradients(self) -> Gradients | None:
        """What the backward pass goes through; None if there is none."""
        return Gradients(self.flow) if self.is_training else None

    def memory(self, rank: int | None = None) -> RankMemory:
        """What a rank (this process's, if not said) holds, at the sizes of the example inputs."""
        rank = self.mesh.own_rank() if rank is None else rank
        return self._measure((rank,))

    def recording(self) -> Recording:
        """The program as a recording, for `show` and `save`."""
        unasked = "" if self.verdicts is not None else "verification was turned off (verify=False)"
        found = Parallelization(
            program=name_program(self.flow),
            axes=self.mesh.records,
            is_training=self.is_training,
            num_ops=sum(isinstance(step, Step) for step in self.flow.steps),
            inserted=tuple(self.collectives),
            fallbacks=tuple(list_fallbacks(self.fallbacks, self.mesh)),
            placed=tuple(list_placed(self.flow, self.plan, self.mesh.seats[0])),
            rank_memory=tuple(self.measure_ranks()),
            verdicts=tuple(self.verdicts or ()),
            unverified=self.not_verified or unasked,
        )
        return make_recording(found, self.mesh)

    def measure_ranks(self) -> list[RankMemory]:
        """The memory of all ranks, those that hold the same in one record."""
        return [self._measure(alike) for alike in ranks_alike(self.flow, self.mesh)]

    def _measure(self, alike: tuple[int, ...]) -> RankMemory:
        seat, joint = self.mesh.seat_of(alike[0]), None
        if self.is_training:
            joint = self.joint(alike[0])
            graph = joint.graph_module.graph
        elif alike[0] in self._written:
            graph = self._written[alike[0]].graph
        else:
            written = self.write(alike[0])
            annotate(self.flow, written)
            graph = written.graph
        num_gradients = 0 if joint is None else len(joint.parameters)
        return hold_memory(
            self.source, self.flow, seat, graph, ranks=alike, num_gradients=num_gradients
        )

    def verify(self, *args: Any, **kwargs: Any) -> list[TensorVerdict]:
        """Run all ranks in this process, compare with the single device, raise if they differ.

        Without arguments, on the inputs that the program was exported with. Where that cannot be
        done, `not_verified` says why.
        """
        example = (args, kwargs) if args or kwargs else self.source.example_inputs
        self.not_verified = why_not(self.source, self.mesh, example)
        if self.not_verified:
            return []
        values, trial = self._values(example), self.make_trial()
        self._check_capture(example, trial, values)
        self.verdicts = prove(trial, values)
        wrong = [one for one in self.verdicts if one.agreement not in FINE]
        if wrong:
            raise refuse(wrong, self.find_culprit(values))
        return self.verdicts

    def _check_capture(self, example: Any, trial: Trial, values: Sequence[Any]) -> None:
        """Against the model itself, where it is at hand and has data."""
        given = [*flatten(example)[0], *self.source.state_dict.values()]
        if self.original is None or any(has_no_data(one) for one in given):
            return
        with preserved_random_state():
            check_faithful(
                self.original,
                self.flow,
                example,
                trial.gradients,
                lambda: run_captured(trial, values),
            )

    def _values(self, example: Any) -> list[Any]:
        """What the program takes: state by name, then inputs; numbers for what has none."""
        found = flatten(example)[0]
        num_wanted = sum(role.kind == "input" for _, role in self.flow.inputs)
        if len(found) != num_wanted:
            raise ParallelError(
                f"the program takes {num_wanted} inputs, and {len(found)} were given. Give those "
                "that it was exported with: the model's, then the targets of the loss."
            )
        leaves = iter(found)
        state = {**self.source.constants, **self.source.state_dict}
        given = [
            next(leaves) if role.kind == "input" else state[role.name]
            for _, role in self.flow.inputs
        ]
        return fill(given)

    def find_culprit(self, values: Sequence[Any]) -> Origin | None:
        """Where in the program the ranks first go wrong, forward; None where they do not."""
        mesh = self.mesh
        ranks = {mesh.rank_at(seat): self._write_to_run(mesh.rank_at(seat)) for seat in mesh.seats}
        with preserved_random_state(), torch.no_grad():
            return find_culprit(
                self.flow,
                mesh,
                self._single,
                ranks,
                values,
                deal_values(self.flow, mesh, values),
                groups_of(mesh),
            )

    def forward(self, rank: int | None = None) -> fx.GraphModule:
        """The rank's forward graph, which takes its state before its inputs."""
        rank = self.mesh.own_rank() if rank is None else rank
        return fx.GraphModule(nn.Module(), self.write(rank).graph)

    def make_trial(
        self, names: Sequence[str | None] | None = None, *, is_run: bool = True
    ) -> Trial:
        """What there is to run, if it is, and to compare; `names` are for the outputs."""
        called = None if names is None else tuple(names)
        ranks = [self.mesh.rank_at(seat) for seat in self.mesh.seats] if is_run else []
        single = fx.Interpreter(self._single).run
        if not self.is_training:
            graphs = {r: self._write_to_run(r).as_module() for r in ranks}
            return Trial(self.flow, self.mesh, single, graphs, names=called)
        return Trial(
            self.flow,
            self.mesh,
            differentiate(self.flow, single),
            {rank: self._joint_to_run(rank) for rank in ranks},
            tuple(trained_parameters(self.flow)),
            called,
        )
