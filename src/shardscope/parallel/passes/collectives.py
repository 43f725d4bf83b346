"""Collectives in a rank's program.

`FunctionalEmitter` writes functional collectives, for programs that only run forward.
`DifferentiableEmitter` writes the autograd functions of this module, whose backward passes are
collectives too; tracing the joint program replaces them by functional collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, final

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from shardscope._torch.collectives.functional import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    WAIT,
)
from shardscope.parallel.ir.mesh import Mesh
from shardscope.parallel.ir.shard_spec import MeshCoordinate
from shardscope.parallel.sharding_rules.context import GraphBuilder
from shardscope.plan.placements import Size

_Saved = TypeVar("_Saved")
_InputGradients = tuple[Tensor | None, ...]


class _Context(Generic[_Saved], Protocol):
    """The context of an autograd function, which saves non-tensors for backward."""

    saved: _Saved


def all_reduce(value: Tensor, reduction: str, group: str) -> Tensor:
    """The sum (or maximum) of the ranks' partial values; its gradient passes unchanged."""
    return _apply(_AllReduce, value, reduction, group)


def allreduce_grad(value: Tensor, group: str) -> Tensor:
    """The value itself; its gradient is all-reduced over the group (Megatron's *f*)."""
    return _apply(_AllReduceGrad, value, group)


def gather(
    value: Tensor, num_ranks: int, rank: int, group: str, *, has_partial_grad: bool
) -> Tensor:
    """All shards along dim 0; the gradient is reduce-scattered if it is partial, else sliced."""
    return _apply(_Gather, value, num_ranks, rank, group, has_partial_grad)


def reduce_scatter(value: Tensor, num_ranks: int, group: str) -> Tensor:
    """The rank's shard along dim 0 of the sum of partial values; the gradient is all-gathered."""
    return _apply(_ReduceScatter, value, num_ranks, group)


def all_to_all(value: Tensor, splits: list[int], group: str) -> Tensor:
    """Exchange chunks along dim 0; so is the gradient."""
    return _apply(_AllToAll, value, splits, group)


def shard_slice(
    value: Tensor, dim: int, start: int, size: int, num_ranks: int, group: str
) -> Tensor:
    """The rank's shard of a replicated value, all shards equal; the gradient is all-gathered."""
    return _apply(_ShardSlice, value, dim, start, size, num_ranks, group)


def _apply(function: type[torch.autograd.Function], *args: object) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


def _call_and_wait(op: Callable[..., Tensor], *args: object) -> Tensor:
    result: Tensor = WAIT(op(*args))
    return result


@final
class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: Tensor, reduction: str, group: str) -> Tensor:
        return _call_and_wait(ALL_REDUCE, value.contiguous(), reduction, group)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> _InputGradients:
        return gradient, None, None


@final
class _AllReduceGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context[str], value: Tensor, group: str) -> Tensor:
        ctx.saved = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: _Context[str], gradient: Tensor) -> _InputGradients:
        return _call_and_wait(ALL_REDUCE, gradient.contiguous(), "sum", ctx.saved), None


@final
class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context[tuple[int, int, str, bool, int]],
        value: Tensor,
        num_ranks: int,
        rank: int,
        group: str,
        has_partial_grad: bool,
    ) -> Tensor:
        ctx.saved = (num_ranks, rank, group, has_partial_grad, value.shape[0])
        return _call_and_wait(ALL_GATHER, value.contiguous(), num_ranks, group)

    @staticmethod
    def backward(
        ctx: _Context[tuple[int, int, str, bool, int]], gradient: Tensor
    ) -> _InputGradients:
        num_ranks, rank, group, has_partial_grad, size = ctx.saved
        if has_partial_grad:
            shard_grad = _call_and_wait(
                REDUCE_SCATTER, gradient.contiguous(), "sum", num_ranks, group
            )
        else:
            shard_grad = gradient.narrow(0, rank * size, size)
        return shard_grad, None, None, None, None


@final
class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context[tuple[int, str]], value: Tensor, num_ranks: int, group: str
    ) -> Tensor:
        ctx.saved = (num_ranks, group)
        return _call_and_wait(REDUCE_SCATTER, value.contiguous(), "sum", num_ranks, group)

    @staticmethod
    def backward(ctx: _Context[tuple[int, str]], gradient: Tensor) -> _InputGradients:
        num_ranks, group = ctx.saved
        return _call_and_wait(ALL_GATHER, gradient.contiguous(), num_ranks, group), None, None


@final
class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context[tuple[list[int], str]], value: Tensor, splits: list[int], group: str
    ) -> Tensor:
        ctx.saved = (splits, group)
        return _call_and_wait(ALL_TO_ALL, value.contiguous(), splits, splits, group)

    @staticmethod
    def backward(ctx: _Context[tuple[list[int], str]], gradient: Tensor) -> _InputGradients:
        splits, group = ctx.saved
        return _call_and_wait(ALL_TO_ALL, gradient.contiguous(), splits, splits, group), None, None


@final
class _ShardSlice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context[tuple[int, int, str]],
        value: Tensor,
        dim: int,
        start: int,
        size: int,
        num_ranks: int,
        group: str,
    ) -> Tensor:
        ctx.saved = (dim, num_ranks, group)
        return value.narrow(dim, start, size)

    @staticmethod
    def backward(ctx: _Context[tuple[int, int, str]], gradient: Tensor) -> _InputGradients:
        dim, num_ranks, group = ctx.saved
        shard_grad = gradient.movedim(dim, 0).contiguous()
        gathered = _call_and_wait(ALL_GATHER, shard_grad, num_ranks, group)
        return gathered.movedim(0, dim), None, None, None, None, None


@final
class FunctionalEmitter:
    """Writes functional collectives, for programs that only run forward."""

    def __init__(self, builder: GraphBuilder, mesh: Mesh, coordinate: MeshCoordinate) -> None:
        self._builder = builder
        self._groups = [mesh.group_name(axis, coordinate) for axis in range(len(mesh.sizes))]
        self._sizes = mesh.sizes

    def all_reduce(self, value: fx.Node, *, axis: int, reduction: str) -> fx.Node:
        # The op's result is contiguous, whatever its shape function says.
        contiguous = self._builder.write(torch.ops.aten.contiguous.default, value)
        return self._call(ALL_REDUCE, contiguous, reduction, self._groups[axis])

    def all_gather(self, value: fx.Node, *, axis: int, has_partial_grad: bool) -> fx.Node:
        return self._call(ALL_GATHER, value, self._sizes[axis], self._groups[axis])

    def reduce_scatter(self, value: fx.Node, *, axis: int) -> fx.Node:
        return self._call(REDUCE_SCATTER, value, "sum", self._sizes[axis], self._groups[axis])

    def all_to_all(self, value: fx.Node, *, axis: int, length: Size) -> fx.Node:
        splits = [self._builder.size(length)] * self._sizes[axis]
        return self._call(ALL_TO_ALL, value, splits, splits, self._groups[axis])

    def allreduce_grad(self, value: fx.Node, *, axis: int) -> fx.Node:
        return value

    def shard_slice(
        self, value: fx.Node, *, axis: int, dim: int, start: Size, size: Size, is_even: bool
    ) -> fx.Node:
        first, last = self._builder.size(start), self._builder.size(start + size)
        return self._builder.write(torch.ops.aten.slice.Tensor, value, dim, first, last)

    def _call(self, op: Callable[..., Tensor], *args: Argument) -> fx.Node:
        return self._builder.write(WAIT, self._builder.write(op, *args))


@final
class DifferentiableEmitter:
    """Writes autograd functions, for programs that are to be differentiated."""

    def __init__(self, builder: GraphBuilder, mesh: Mesh, coordinate: MeshCoordinate) -> None:
        self._builder = builder
        self._groups = [mesh.group_name(axis, coordinate) for axis in range(len(mesh.sizes))]
        self._coordinate = coordinate

    def all_reduce(self, value: fx.Node, *, axis: int, reduction: str) -> fx.Node:
        return self._builder.write(all_reduce, value, reduction, self._groups[axis])

    def all_gather(self, value: fx.Node, *, axis: int, has_partial_grad: bool) -> fx.Node:
        num_ranks, rank = self._coordinate.sizes[axis], self._coordinate.coordinates[axis]
        group = self._groups[axis]
        return self._builder.write(
            gather, value, num_ranks, rank, group, has_partial_grad=has_partial_grad
        )

    def reduce_scatter(self, value: fx.Node, *, axis: int) -> fx.Node:
        return self._builder.write(
            reduce_scatter, value, self._coordinate.sizes[axis], self._groups[axis]
        )

    def all_to_all(self, value: fx.Node, *, axis: int, length: Size) -> fx.Node:
        splits = [self._builder.size(length)] * self._coordinate.sizes[axis]
        return self._builder.write(all_to_all, value, splits, self._groups[axis])

    def shard_slice(
        self, value: fx.Node, *, axis: int, dim: int, start: Size, size: Size, is_even: bool
    ) -> fx.Node:
        """The gradient of equal shards is all-gathered; of uneven ones, padded and all-reduced."""
        num_ranks = self._coordinate.sizes[axis]
        first, length = self._builder.size(start), self._builder.size(size)
        if is_even:
            return self._builder.write(
                shard_slice, value, dim, first, length, num_ranks, self._groups[axis]
            )
        last = self._builder.size(start + size)
        reduced = self.allreduce_grad(value, axis=axis)
        return self._builder.write(torch.ops.aten.slice.Tensor, reduced, dim, first, last)

    def allreduce_grad(self, value: fx.Node, *, axis: int) -> fx.Node:
        return self._builder.write(allreduce_grad, value, self._groups[axis])
