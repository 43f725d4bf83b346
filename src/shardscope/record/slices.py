"""Which rank holds which part of a tensor."""

from __future__ import annotations

from msgspec import Struct

from shardscope.record.ranks import Natural, RankSpan
from shardscope.record.source import Axis

__all__ = ["Slice", "TensorLayout"]

Stretches = tuple[tuple[Natural, Natural], ...]
"""Indices along one dim, each stretch from its first to before its second; most often one."""


class Slice(Struct, frozen=True, kw_only=True, gc=False):
    """A part of a tensor, and the ranks that hold it: several where it is replicated."""

    ranks: tuple[RankSpan, ...]
    stretches: tuple[Stretches, ...]  # one for each dim


class TensorLayout(Struct, frozen=True, kw_only=True, gc=False):
    """How a tensor lies on a mesh; `slices` are in the order of the mesh's ranks."""

    name: str
    shape: tuple[Natural, ...]
    axes: tuple[Axis, ...]
    placements: tuple[str, ...]
    slices: tuple[Slice, ...]
