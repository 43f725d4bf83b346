"""Records of `coverage` and `visualize_sharding`: which ops run on shards, and which rank holds
which slice of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from shardscope.drawing import draw_inline
from shardscope.record.base import Axis, Record, Source
from shardscope.record.ranks import Natural, Rank, RankSpan


class Level(StrEnum):
    """How far ops are decomposed: as torch.export returns them, or further.

    For backward, which torch.export does not return, `exported` has the ops that autograd calls.
    """

    EXPORTED = "exported"
    CORE_ATEN = "core_aten"
    INDUCTOR = "inductor"


class OpVerdict(StrEnum):
    """What happens to an op when its inputs are sharded."""

    LOCAL = "local"  # on each rank by itself: none of its inputs is sharded
    SHARDED = "sharded"  # by a rule, without communication
    REDISTRIBUTED = "redistributed"  # by a rule, after an input was redistributed
    DECOMPOSED = "decomposed"  # by the rules of the ops that it decomposes into
    REPLICATED = "replicated"  # only with every input replicated
    MISSING = "missing"  # it raises
    WRONG = "wrong"  # it runs and gives another result


class Move(Record, frozen=True, kw_only=True, gc=False):
    """An input that is redistributed before the op runs."""

    argument: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    num_bytes: Natural  # that this rank sends


class Sharding(Record, frozen=True, kw_only=True, gc=False):
    """One layout of an op's inputs, and its verdict.

    `inputs` has the placements, such as `mat2: Shard(0)`; without a plan only those of sharded
    inputs. `outputs` has those of the results, empty for a plain tensor.
    """

    inputs: tuple[str, ...]
    verdict: OpVerdict
    outputs: tuple[str, ...] = ()
    num_bytes: Natural | None = None  # that this rank sends, at the most; None if it is not known
    detail: str = ""


class OpCoverage(Record, frozen=True, kw_only=True, gc=False):
    """One op of a model, with the worst verdict of its calls."""

    op: str
    schema: str
    verdict: OpVerdict
    num_forward: Natural = 0
    num_backward: Natural = 0
    flops: Natural | None = None  # of all its calls; None where torch has no formula for it
    detail: str = ""
    remedy: str = ""
    moves: tuple[Move, ...] = ()
    shardings: tuple[Sharding, ...] = ()
    modules: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()


class Coverage(Record, frozen=True, kw_only=True, gc=False):
    """All ops of a model at one level, on one mesh.

    `has_plan` means that placements were given by the model or a plan; otherwise every sharding of
    one input at a time was tried.
    """

    rank: Rank
    level: Level
    axes: tuple[Axis, ...]
    has_plan: bool
    ops: tuple[OpCoverage, ...] = ()


Stretches = tuple[tuple[Natural, Natural], ...]
"""Indices along one dim, each stretch from its first to before its second; most often one."""


class Slice(Record, frozen=True, kw_only=True, gc=False):
    """A part of a tensor, and the ranks that hold it; several if it is replicated."""

    ranks: tuple[RankSpan, ...]
    stretches: tuple[Stretches, ...]  # one for each dim


class TensorLayout(Record, frozen=True, kw_only=True, gc=False):
    """The layout of a tensor on a mesh; `slices` are in the order of the mesh's ranks."""

    name: str
    shape: tuple[Natural, ...]
    axes: tuple[Axis, ...]
    placements: tuple[str, ...]
    slices: tuple[Slice, ...]

    def _repr_html_(self) -> str:
        """What `show` draws, for notebooks."""
        return draw_inline(self)


def cut_stretches(held: Stretches, num_parts: int, part: int) -> Stretches:
    """Split index ranges as `torch.chunk` does, and return one part; `((0, 0),)` is empty.

    Args:
        held: Index ranges, each `(first, after the last)`.
        num_parts: The number of parts.
        part: Which part, from 0.

    Examples:
        >>> cut_stretches(((0, 8),), 4, 1)
        ((2, 4),)
    """
    size = sum(stop - start for start, stop in held)
    length = -(-size // num_parts)
    first, last = min(size, part * length), min(size, (part + 1) * length)
    ranges, position = [], 0
    for start, stop in held:
        low = max(first, position) - position + start
        high = min(last, position + stop - start) - position + start
        if low < high:
            ranges.append((low, high))
        position += stop - start
    return _join(ranges)


def _join(stretches: Sequence[tuple[int, int]]) -> Stretches:
    """Merge adjacent ranges; no range at all becomes an empty one."""
    joined: list[tuple[int, int]] = []
    for start, stop in stretches:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined) or ((0, 0),)
