"""Collectives that know their gradients, for programs that are differentiated.

A value that is whole on every rank has a gradient that is whole; one in pieces has it in pieces;
the gradient of addends is whole. So the sum of addends passes its gradient on as it is, and what
enters a computation in pieces gets its gradient summed (`enter`). Each is written for the joint
program to be traced: what stays are ops that name their group.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from shardscope._torch.functional_collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    WAIT,
)

__all__ = ["all_reduce", "all_to_all", "enter", "gather", "reduce_scatter", "take"]


def all_reduce(value: Tensor, reduction: str, group: str) -> Tensor:
    """The sum of addends."""
    return _apply(_AllReduce, value, reduction, group)


def enter(value: Tensor, group: str) -> Tensor:
    """The value itself; its gradient is summed over the group."""
    return _apply(_Enter, value, group)


def gather(value: Tensor, num_ranks: int, rank: int, group: str, *, is_entering: bool) -> Tensor:
    """All pieces along dim 0; if what follows works in pieces, the gradients are summed first."""
    return _apply(_Gather, value, num_ranks, rank, group, is_entering)


def reduce_scatter(value: Tensor, num_ranks: int, group: str) -> Tensor:
    """The rank's piece along dim 0 of the sum of addends."""
    return _apply(_ReduceScatter, value, num_ranks, group)


def all_to_all(value: Tensor, splits: list[int], group: str) -> Tensor:
    """Pieces along dim 0 exchanged."""
    return _apply(_AllToAll, value, splits, group)


def take(value: Tensor, dim: int, start: int, size: int, num_ranks: int, group: str) -> Tensor:
    """The rank's piece of a whole value, of pieces of one size."""
    return _apply(_Take, value, dim, start, size, num_ranks, group)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


def _done(op: Any, *args: Any) -> Tensor:
    result: Tensor = WAIT(op(*args))
    return result


@final
class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, reduction: str, group: str) -> Tensor:
        return _done(ALL_REDUCE, value.contiguous(), reduction, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None, None


@final
class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: str) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _done(ALL_REDUCE, gradient.contiguous(), "sum", ctx.group), None


@final
class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, num_ranks: int, rank: int, group: str, is_entering: bool
    ) -> Tensor:
        ctx.given = (num_ranks, rank, group, is_entering, value.shape[0])
        return _done(ALL_GATHER, value.contiguous(), num_ranks, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        num_ranks, rank, group, is_entering, size = ctx.given
        if is_entering:
            mine = _done(REDUCE_SCATTER, gradient.contiguous(), "sum", num_ranks, group)
        else:
            mine = gradient.narrow(0, rank * size, size)
        return mine, None, None, None, None


@final
class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, num_ranks: int, group: str) -> Tensor:
        ctx.given = (num_ranks, group)
        return _done(REDUCE_SCATTER, value.contiguous(), "sum", num_ranks, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        num_ranks, group = ctx.given
        return _done(ALL_GATHER, gradient.contiguous(), num_ranks, group), None, None


@final
class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, splits: list[int], group: str) -> Tensor:
        ctx.given = (splits, group)
        return _done(ALL_TO_ALL, value.contiguous(), splits, splits, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        splits, group = ctx.given
        return _done(ALL_TO_ALL, gradient.contiguous(), splits, splits, group), None, None


@final
class _Take(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, dim: int, start: int, size: int, num_ranks: int, group: str
    ) -> Tensor:
        ctx.given = (dim, num_ranks, group)
        return value.narrow(dim, start, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        dim, num_ranks, group = ctx.given
        sent = gradient.movedim(dim, 0).contiguous()
        together = _done(ALL_GATHER, sent, num_ranks, group)
        return together.movedim(0, dim), None, None, None, None, None
