"""Collectives as a rank's program spells them: ops that name their group, and a wait."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import fx

from shardscope._torch.functional_collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    WAIT,
)
from shardscope.parallel import duals
from shardscope.parallel.layouts import Seat
from shardscope.parallel.mesh import Mesh
from shardscope.parallel.placements import Size
from shardscope.parallel.rules.local import Pen

__all__ = ["FunctionalWire", "TrainingWire"]


@final
class FunctionalWire:
    """For programs that only run forward."""

    def __init__(self, pen: Pen, mesh: Mesh, seat: Seat) -> None:
        self._pen = pen
        self._groups = [mesh.group_name(axis, seat) for axis in range(len(mesh.sizes))]
        self._sizes = mesh.sizes

    def all_reduce(self, value: fx.Node, *, axis: int, reduction: str) -> fx.Node:
        # The op's result has no gaps, whatever its shape function says.
        whole = self._pen.write(torch.ops.aten.contiguous.default, value)
        return self._call(ALL_REDUCE, whole, reduction, self._groups[axis])

    def all_gather(self, value: fx.Node, *, axis: int, is_entering: bool) -> fx.Node:
        return self._call(ALL_GATHER, value, self._sizes[axis], self._groups[axis])

    def reduce_scatter(self, value: fx.Node, *, axis: int) -> fx.Node:
        return self._call(REDUCE_SCATTER, value, "sum", self._sizes[axis], self._groups[axis])

    def all_to_all(self, value: fx.Node, *, axis: int, length: Size) -> fx.Node:
        splits = [self._pen.size(length)] * self._sizes[axis]
        return self._call(ALL_TO_ALL, value, splits, splits, self._groups[axis])

    def enter(self, value: fx.Node, *, axis: int) -> fx.Node:
        return value

    def take(
        self, value: fx.Node, *, axis: int, dim: int, start: Size, size: Size, is_even: bool
    ) -> fx.Node:
        first, last = self._pen.size(start), self._pen.size(start + size)
        return self._pen.write(torch.ops.aten.slice.Tensor, value, dim, first, last)

    def _call(self, op: Any, *args: Any) -> fx.Node:
        return self._pen.write(WAIT, self._pen.write(op, *args))


@final
class TrainingWire:
    """For programs that are to be differentiated."""

    def __init__(self, pen: Pen, mesh: Mesh, seat: Seat) -> None:
        self._pen = pen
        self._groups = [mesh.group_name(axis, seat) for axis in range(len(mesh.sizes))]
        self._seat = seat

    def all_reduce(self, value: fx.Node, *, axis: int, reduction: str) -> fx.Node:
        return self._pen.write(duals.all_reduce, value, reduction, self._groups[axis])

    def all_gather(self, value: fx.Node, *, axis: int, is_entering: bool) -> fx.Node:
        num_ranks, rank = self._seat.sizes[axis], self._seat.coordinates[axis]
        group = self._groups[axis]
        return self._pen.write(duals.gather, value, num_ranks, rank, group, is_entering=is_entering)

    def reduce_scatter(self, value: fx.Node, *, axis: int) -> fx.Node:
        return self._pen.write(
            duals.reduce_scatter, value, self._seat.sizes[axis], self._groups[axis]
        )

    def all_to_all(self, value: fx.Node, *, axis: int, length: Size) -> fx.Node:
        splits = [self._pen.size(length)] * self._seat.sizes[axis]
        return self._pen.write(duals.all_to_all, value, splits, self._groups[axis])

    def take(
        self, value: fx.Node, *, axis: int, dim: int, start: Size, size: Size, is_even: bool
    ) -> fx.Node:
        """Where pieces are of one size, the gradient's pieces are gathered; else summed."""
        num_ranks = self._seat.sizes[axis]
        first, length = self._pen.size(start), self._pen.size(size)
        if is_even:
            return self._pen.write(
                duals.take, value, dim, first, length, num_ranks, self._groups[axis]
            )
        last = self._pen.size(start + size)
        entered = self.enter(value, axis=axis)
        return self._pen.write(torch.ops.aten.slice.Tensor, entered, dim, first, last)

    def enter(self, value: fx.Node, *, axis: int) -> fx.Node:
        return self._pen.write(duals.enter, value, self._groups[axis])
