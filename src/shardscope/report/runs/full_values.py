"""Figures of full tensors, merged from the samples of all ranks.

Norms and sums of distinct shards add up, and copies count once. Of a DTensor, placements say which
is which. Of a plain tensor nothing says so: it may be a copy, a shard of the batch, or a partial
sum. `list_readings` gives all possibilities, of which those with the same number of elements as in
the other run are compared.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from shardscope.record import Axis, ValueSample

_MAX_COPIES = 4  # that differ, and are each tried as the right one


class Reading(StrEnum):
    """How the local tensors of ranks make up the full tensor."""

    FULL = "full"  # one rank, or a DTensor, has all of it
    COPIES = "copies"
    SHARDS = "shards"
    PARTIAL = "partial sums"


@dataclass(frozen=True)
class FullValue:
    """Figures of a full tensor under one reading of its local tensors.

    `copies` are the figures of each rank that should have the same as these, and does not. Sums of
    squares are None for partial sums: norms of terms say nothing about that of the sum.
    """

    reading: Reading
    num_elements: int
    sum: float | None
    sum_squares: float | None
    max_abs: float | None
    num_nonfinite: int
    dtype: str
    hashes: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    copies: tuple[FullValue, ...] = ()

    @property
    def norm(self) -> float | None:
        """The Euclidean norm."""
        return None if self.sum_squares is None else math.sqrt(max(0.0, self.sum_squares))


def merge_calls(samples: Iterable[ValueSample]) -> list[ValueSample]:
    """One sample for each rank, of all calls of a module together."""
    by_rank: dict[int, list[ValueSample]] = defaultdict(list)
    for sample in samples:
        by_rank[sample.rank].append(sample)
    return [_merge_rank(own) for own in by_rank.values()]


def _merge_rank(own: Sequence[ValueSample]) -> ValueSample:
    first = own[0]
    if len(own) == 1:
        return first
    num_elements = sum(math.prod(sample.local_shape) for sample in own)
    num_full = sum(math.prod(sample.shape) for sample in own)
    return ValueSample(
        rank=first.rank,
        step=first.step,
        order=first.order,
        kind=first.kind,
        name=first.name,
        path=first.path,
        dtype=first.dtype,
        shape=(num_full,),
        local_shape=(num_elements,),
        axes=first.axes,
        coordinate=first.coordinate,
        placements=first.placements,
        mesh_rank=first.mesh_rank,
        sum=_add(sample.sum for sample in own),
        sum_squares=_add(sample.sum_squares for sample in own),
        max_abs=_find_max(sample.max_abs for sample in own),
        num_nonfinite=sum(sample.num_nonfinite for sample in own),
        hash="+".join(sample.hash for sample in own),
    )


def list_readings(
    samples: Sequence[ValueSample], axes: Sequence[Axis], *, may_be_partial: bool
) -> list[FullValue]:
    """The full tensor under each reading of the samples of all ranks; empty if none fits."""
    units = list(_merge_meshes(samples))
    if not units:
        return []
    if len(units) == 1:
        return units
    readings = [*_read_copies(units), *_read_shards(units), *_read_axes(units, axes)]
    if may_be_partial:
        readings += [_read_partial(units)]
    return readings


def read_partial_sum(samples: Sequence[ValueSample]) -> FullValue | None:
    """The full tensor if each rank has a term of it; None if all have the same."""
    units = list(_merge_meshes(samples))
    has_terms = len({unit.hashes for unit in units}) > 1
    return _read_partial(units) if has_terms else None


def _merge_meshes(samples: Sequence[ValueSample]) -> Iterator[FullValue]:
    """Each plain tensor, and each DTensor of which all shards are there."""
    meshes: dict[tuple[int | None, tuple[str, ...]], list[ValueSample]] = defaultdict(list)
    for sample in sorted(samples, key=lambda sample: sample.rank):
        if sample.placements:
            meshes[sample.mesh_rank, sample.axes].append(sample)
        else:
            yield _read_sample(sample, Reading.FULL)
    for members in meshes.values():
        value = _merge_mesh(members)
        if value is not None:
            yield value


def _read_sample(sample: ValueSample, reading: Reading) -> FullValue:
    return FullValue(
        reading=reading,
        num_elements=math.prod(sample.local_shape),
        sum=sample.sum,
        sum_squares=sample.sum_squares,
        max_abs=sample.max_abs,
        num_nonfinite=sample.num_nonfinite,
        dtype=sample.dtype,
        hashes=(sample.hash,),
        ranks=(sample.rank,),
    )


def _merge_mesh(members: Sequence[ValueSample]) -> FullValue | None:
    """A DTensor from the local tensors of its mesh; None if ranks are missing."""
    placements, shape = members[0].placements, members[0].shape
    if any("NormPartial" in placement for placement in placements):
        return None
    shards: dict[tuple[int, ...], FullValue] = {}
    copies: dict[tuple[int, ...], list[FullValue]] = defaultdict(list)
    for member in members:
        place = _find_place(member)
        value = _read_sample(member, Reading.FULL)
        if place not in shards:
            shards[place] = value
        elif value.hashes != shards[place].hashes:
            copies[place].append(value)
    full = _combine(list(shards.values()), Reading.FULL)
    if any("Partial" in placement for placement in placements):
        has_shards = any("Shard" in placement for placement in placements)
        num_elements = math.prod(shape) if has_shards else next(iter(shards.values())).num_elements
        return replace(full, sum_squares=None, max_abs=None, num_elements=num_elements)
    if full.num_elements != math.prod(shape):
        return None
    changed = (
        replace(_combine([*(shards | {place: copy}).values()], Reading.FULL), ranks=copy.ranks)
        for place, place_copies in copies.items()
        for copy in place_copies
    )
    return replace(full, copies=tuple(changed))


def _find_place(sample: ValueSample) -> tuple[int, ...]:
    """Which shard or term of a DTensor a rank has: the same for copies."""
    return tuple(
        index
        for index, placement in zip(sample.coordinate, sample.placements, strict=True)
        if placement != "Replicate"
    )


def _combine(parts: Sequence[FullValue], reading: Reading) -> FullValue:
    """Distinct shards as one tensor."""
    return FullValue(
        reading=reading,
        num_elements=sum(part.num_elements for part in parts),
        sum=_add(part.sum for part in parts),
        sum_squares=_add(part.sum_squares for part in parts),
        max_abs=_find_max(part.max_abs for part in parts),
        num_nonfinite=sum(part.num_nonfinite for part in parts),
        dtype=parts[0].dtype,
        hashes=tuple(text for part in parts for text in part.hashes),
        ranks=tuple(rank for part in parts for rank in part.ranks),
        copies=tuple(copy for part in parts for copy in part.copies),
    )


def _read_copies(units: Sequence[FullValue]) -> Iterator[FullValue]:
    """Each rank has all of it; where copies differ, the most common may be the right ones."""
    if len({unit.num_elements for unit in units}) > 1:
        return
    counts = Counter(unit.hashes for unit in units)
    for common, _ in counts.most_common(_MAX_COPIES):
        first = next(unit for unit in units if unit.hashes == common)
        differing = tuple(unit for unit in units if unit.hashes != common)
        yield replace(first, reading=Reading.COPIES, copies=first.copies + differing)


def _read_shards(units: Sequence[FullValue]) -> Iterator[FullValue]:
    """Each rank has a part; or those do whose parts differ, and the others have copies."""
    yield _combine(units, Reading.SHARDS)
    distinct = {unit.hashes: unit for unit in units}
    if 1 < len(distinct) < len(units):
        yield _combine(list(distinct.values()), Reading.SHARDS)


def _read_axes(units: Sequence[FullValue], axes: Sequence[Axis]) -> Iterator[FullValue]:
    """Shards along some axes of the mesh, and copies along the others."""
    sizes = [axis.size for axis in axes]
    if len(axes) < 2 or math.prod(sizes) <= max(unit.ranks[0] for unit in units):
        return
    for count in range(1, len(axes)):
        for sharded in itertools.combinations(range(len(axes)), count):
            shards: dict[tuple[int, ...], list[FullValue]] = defaultdict(list)
            for unit in units:
                coordinate = _find_coordinate(unit.ranks[0], sizes)
                shards[tuple(coordinate[axis] for axis in sharded)].append(unit)
            if 1 < len(shards) < len(units):
                copies = [next(_read_copies(group), None) for group in shards.values()]
                if all(copy is not None for copy in copies):
                    yield _combine([copy for copy in copies if copy], Reading.SHARDS)


def _find_coordinate(rank: int, sizes: Sequence[int]) -> list[int]:
    coordinate: list[int] = []
    for size in reversed(sizes):
        coordinate.insert(0, rank % size)
        rank //= size
    return coordinate


def _read_partial(units: Sequence[FullValue]) -> FullValue:
    distinct = list({unit.hashes: unit for unit in units}.values())
    full = _combine(distinct, Reading.PARTIAL)
    return replace(
        full,
        num_elements=units[0].num_elements,
        sum_squares=None,
        max_abs=None,
        copies=(),
    )


def _add(values: Iterable[float | None]) -> float | None:
    known = list(values)
    if any(value is None for value in known):
        return None
    return math.fsum(value for value in known if value is not None)


def _find_max(values: Iterable[float | None]) -> float | None:
    known = list(values)
    if any(value is None for value in known):
        return None
    return max((value for value in known if value is not None), default=None)
