"""A program for each rank, and what is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

from torch import nn
from torch.export import ExportedProgram

from shardscope.parallel.exported import build_exported, local_inputs, local_state
from shardscope.parallel.flow import Flow, Move, Value
from shardscope.parallel.layouts import Layout, Seat
from shardscope.parallel.mesh import Mesh
from shardscope.parallel.partition import RankProgram, write_rank
from shardscope.parallel.plan import Resolved
from shardscope.parallel.propagate import Fallback
from shardscope.parallel.wires import FunctionalWire

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

    @property
    def moves(self) -> list[Move]:
        """Every change of a placement, in order."""
        return [step for step in self.flow.steps if isinstance(step, Move)]

    def verify(self) -> None:
        """Run all ranks and compare."""
