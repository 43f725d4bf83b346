"""A program for each rank, and what is known of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from shardscope._torch.programs import flatten
from shardscope.errors import ParallelError
from shardscope.parallel.culprit import find_culprit
from shardscope.parallel.exported import build_exported, local_state
from shardscope.parallel.flow import Flow, Move
from shardscope.parallel.joint import JointGraph, differentiate, trace_joint, trained_parameters
from shardscope.parallel.mesh import Mesh
from shardscope.parallel.partition import RankProgram, write_rank
from shardscope.parallel.plan.resolved import Resolved
from shardscope.parallel.propagate import Fallback
from shardscope.parallel.running.module import RankModule
from shardscope.parallel.running.training import TrainingModule
from shardscope.parallel.verdicts import fill, refuse, why_not
from shardscope.parallel.verify import Trial, deal_values, groups_of, prove
from shardscope.parallel.wires import FunctionalWire, TrainingWire
from shardscope.record import FINE, TensorVerdict
from shardscope.shard.reference import kept_random_state

__all__ = ["ParallelProgram"]


@final
@dataclass(eq=False)
class ParallelProgram:
    """The single-device program, cut for a mesh. Ranks' programs are written when asked for."""

    source: ExportedProgram
    flow: Flow
    mesh: Mesh
    plan: Resolved
    fallbacks: list[Fallback]
    is_training: bool = False
    verdicts: list[TensorVerdict] | None = None
    not_verified: str = ""
    _written: dict[int, ExportedProgram] = field(default_factory=dict)
    _joints: dict[int, JointGraph] = field(default_factory=dict)

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
        state = local_state(self.source.state_dict, self.flow, seat)
        constants = local_state(self.source.constants, self.flow, seat)
        return TrainingModule(self.source, self.flow, self.joint(rank), seat, state, constants)

    def joint(self, rank: int | None = None) -> JointGraph:
        """The rank's forward and backward program."""
        rank = self.mesh.own_rank() if rank is None else rank
        if rank not in self._joints:
            seat = self.mesh.seat_of(rank)
            written = write_rank(self.flow, seat, lambda pen: TrainingWire(pen, self.mesh, seat))
            self._joints[rank] = trace_joint(self.flow, written)
        return self._joints[rank]

    def write(self, rank: int) -> RankProgram:
        """The rank's graph, without state."""
        seat = self.mesh.seat_of(rank)
        return write_rank(self.flow, seat, lambda pen: FunctionalWire(pen, self.mesh, seat))

    @property
    def moves(self) -> list[Move]:
        """Every change of a placement, in order."""
        return [step for step in self.flow.steps if isinstance(step, Move)]

    def verify(self, *args: Any, **kwargs: Any) -> list[TensorVerdict]:
        """Run all ranks in this process, compare with the single device, raise if they differ.

        Without arguments, on the inputs that the program was exported with. Where that cannot be
        done, `not_verified` says why.
        """
        example = (args, kwargs) if args or kwargs else self.source.example_inputs
        self.not_verified = why_not(self.source, self.mesh, example)
        if self.not_verified:
            return []
        values = self._values(example)
        self.verdicts = prove(self._trial(), values)
        wrong = [one for one in self.verdicts if one.agreement not in FINE]
        if wrong:
            raise self._refuse(wrong, values)
        return self.verdicts

    def _values(self, example: Any) -> list[Any]:
        """What the program takes: state by name, then inputs; numbers for what has none."""
        leaves = iter(flatten(example)[0])
        state = {**self.source.constants, **self.source.state_dict}
        given = [
            next(leaves) if role.kind == "input" else state[role.name]
            for _, role in self.flow.inputs
        ]
        return fill(given)

    def _refuse(self, wrong: Sequence[TensorVerdict], values: Sequence[Any]) -> ParallelError:
        mesh = self.mesh
        ranks = {mesh.rank_at(seat): self.write(mesh.rank_at(seat)) for seat in mesh.seats}
        with kept_random_state(), torch.no_grad():
            culprit = find_culprit(
                self.flow,
                mesh,
                self.source.graph_module,
                ranks,
                values,
                deal_values(self.flow, mesh, values),
                groups_of(mesh),
            )
        return refuse(wrong, culprit)

    def _trial(self) -> Trial:
        ranks = [self.mesh.rank_at(seat) for seat in self.mesh.seats]
        single = fx.Interpreter(self.source.graph_module).run
        if not self.is_training:
            graphs = {r: fx.GraphModule(nn.Module(), self.write(r).graph) for r in ranks}
            return Trial(self.flow, self.mesh, single, graphs)
        return Trial(
            self.flow,
            self.mesh,
            differentiate(self.flow, single),
            {rank: self.joint(rank).graph_module for rank in ranks},
            tuple(trained_parameters(self.flow)),
        )
