"""Cutting a dim that is several weights or heads one after the other: each part, whole heads."""

from __future__ import annotations

from shardscope.errors import PlanError
from shardscope.parallel.placements import Shard
from shardscope.parallel.plan.spelling import say
from shardscope.parallel.plan.styles import CutStyle, Parts

__all__ = ["cut_in_blocks"]


def cut_in_blocks(
    said: CutStyle | Shard, dim: int, size: int, *, over: str, ranks: int, what: str
) -> Shard:
    """The cut of `dim`, which has `size`, that keeps to the parts and heads that were said.

    `over` names the axes (`tp=8`) that make `ranks` pieces, and `what` the tensor.
    """
    which = f"dim {dim} of {what} ({size})"
    if isinstance(said, Shard):
        parts = _parts(say(said), said.segments or said.outer, size, which)
    elif said.fused is None and isinstance(said.heads, tuple):
        parts = _parts_of_heads(said.heads, size, which)
    else:
        parts = _parts(repr(said), said.fused, size, which)
    if not isinstance(said, Shard):
        _check_heads(said.heads, parts, over=over, ranks=ranks, what=what)
    if len(parts) == 1:
        return Shard(dim)
    _check_parts(parts, over=over, ranks=ranks, which=which)
    is_even = len(set(parts)) == 1
    return Shard(dim, outer=len(parts)) if is_even else Shard(dim, segments=parts)


def _check_parts(parts: tuple[int, ...], *, over: str, ranks: int, which: str) -> None:
    uneven = next((part for part in parts if part % ranks), None)
    if uneven is not None:
        raise PlanError(
            f"The part of {uneven} in {which} does not divide over {over}. Choose an axis size "
            "that divides it, or keep the tensor replicated with Replicated()."
        )


def _parts(said: str, fused: Parts, size: int, which: str) -> tuple[int, ...]:
    """The sizes of the parts of the dim."""
    if isinstance(fused, tuple):
        if sum(fused) != size:
            raise PlanError(
                f"{said} names parts of {' + '.join(map(str, fused))} = {sum(fused)}, but {which} "
                "is not that long. Give the sizes of its parts."
            )
        return fused
    count = fused or 1
    if size % count:
        raise PlanError(
            f"{said} has {count} equal parts, but {which} does not divide by that. Give the "
            "number of its parts, or their sizes."
        )
    return (size // count,) * count


def _parts_of_heads(heads: tuple[int, ...], size: int, which: str) -> tuple[int, ...]:
    if size % sum(heads):
        raise PlanError(
            f"heads={heads} makes {sum(heads)} heads of one size, but {which} does not divide by "
            "that. Give the heads that it has, or the sizes of its parts with fused=."
        )
    return tuple(size // sum(heads) * one for one in heads)


def _check_heads(heads: Parts, parts: tuple[int, ...], *, over: str, ranks: int, what: str) -> None:
    if heads is None:
        return
    each = heads if isinstance(heads, tuple) else (heads,) * len(parts)
    if len(each) != len(parts):
        raise PlanError(
            f"heads={heads} is for {len(each)} parts, but {what} has {len(parts)}. Give one number "
            "for each part, or one for all."
        )
    for number, part in zip(each, parts, strict=True):
        if part % number:
            raise PlanError(
                f"{what} has no {number} heads: {part} does not divide by {number}. Give its "
                "number of heads."
            )
        if number % ranks:
            raise PlanError(
                f"{number} heads do not divide over {over} ({what}). Choose an axis size that "
                f"divides {number}, or keep the tensor replicated with Replicated()."
            )
