"""A program for each rank, and what is known of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from torch import nn
from torch.export import ExportedProgram

from shardscope.parallel.exported import build_exported
from shardscope.parallel.flow import Flow, Move
from shardscope.parallel.joint import JointGraph, trace_joint
from shardscope.parallel.mesh import Mesh
from shardscope.parallel.partition import RankProgram, write_rank
from shardscope.parallel.plan import Resolved
from shardscope.parallel.propagate import Fallback
from shardscope.parallel.symbols import open_sizes
from shardscope.parallel.wires import FunctionalWire, TrainingWire

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
    _written: dict[int, ExportedProgram] = field(default_factory=dict)

    def exported(self, rank: int | None = None) -> ExportedProgram:
        """The program of a rank (this process's, if not said) with its share of the state."""
        rank = self.mesh.own_rank() if rank is None else rank
        if rank not in self._written:
            self._written[rank] = build_exported(self.source, self.flow, self.write(rank))
        return self._written[rank]

    def module(self, rank: int | None = None) -> nn.Module:
        """The rank's program to call."""
        return self.exported(rank).module()

    def write(self, rank: int) -> RankProgram:
        """The rank's graph, without state."""
        seat = self.mesh.seat_of(rank)
        return write_rank(self.flow, seat, lambda pen: FunctionalWire(pen, self.mesh, seat))

    def joint(self, rank: int | None = None) -> JointGraph:
        """The rank's forward and backward program."""
        seat = self.mesh.seat_of(self.mesh.own_rank() if rank is None else rank)
        written = write_rank(self.flow, seat, lambda pen: TrainingWire(pen, self.mesh, seat))
        return trace_joint(self.flow, written, open_sizes(self.flow))

    @property
    def moves(self) -> list[Move]:
        """Every change of a placement, in order."""
        return [step for step in self.flow.steps if isinstance(step, Move)]

    def verify(self) -> None:
        """Run all ranks and compare."""
