"""Finds the collective of the ranks that computed a wrong value, and its line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch

from shardscope.numerics import find_rms, to_fp64_on_cpu
from shardscope.parallel.equivalence import StepResult
from shardscope.parallel.parity.probe import ProbePoint, Role
from shardscope.record import Phase, Source

_RTOL = 1e-4  # single precision after a few ops
_RTOL_OF_NUMBER = 1e-6  # a number alone may agree by chance
_MAX_STARTS = 64  # places in a bucket where a tensor may begin


@final
@dataclass(frozen=True, eq=False)
class CollectiveResult:
    """What a collective of one rank returned, flattened, and the line that called it."""

    phase: Phase
    source: Source
    values: torch.Tensor


Collectives = Sequence[Sequence[CollectiveResult]]
"""The results of the collectives of each rank, in the order in which they ran."""


def take_collectives(ranks: Sequence[StepResult]) -> tuple[list[StepResult], Collectives]:
    """The results of the ranks without those of collectives, and these."""
    stripped: list[StepResult] = []
    collectives: list[list[CollectiveResult]] = []
    for rank in ranks:
        points = {name: ProbePoint.decode(name) for name in rank.snapshots}
        of_modules = {
            name: rank.snapshots[name]
            for name, point in points.items()
            if point.role is not Role.COMMUNICATED
        }
        stripped.append(replace(rank, snapshots=of_modules))
        collectives.append(list(_list_collectives(rank, points)))
    return stripped, collectives


def _list_collectives(
    rank: StepResult, points: Mapping[str, ProbePoint]
) -> Iterator[CollectiveResult]:
    for name, point in points.items():
        if point.role is Role.COMMUNICATED:
            yield CollectiveResult(point.phase, rank.sources[name], rank.snapshots[name])


def find_line(
    values: Sequence[torch.Tensor | None], collectives: Collectives, phase: Phase | None = None
) -> Source | None:
    """The line of the last collective that computed this value on every rank that has it.

    `values` has the value of each rank. It may be a multiple of what the collective returned, in
    another order, or a part of a bucket. None if no collective computed it.
    """
    sources: list[Source] | None = None
    for value, of_rank in zip(values, collectives, strict=False):
        if value is None:
            continue
        wanted = to_fp64_on_cpu(value).flatten()
        lines = [
            result.source
            for result in reversed(of_rank)
            if phase in (None, result.phase) and _is_computed_by(wanted, result.values)
        ]
        sources = lines if sources is None else [line for line in sources if line in lines]
    return sources[0] if sources else None


def _is_computed_by(wanted: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether a flat tensor is a multiple of another one, or a part of it."""
    size, scale = wanted.numel(), find_rms(wanted)
    if not size or values.numel() < size or not scale > 0:
        return False
    result = to_fp64_on_cpu(values)
    if size == 1:
        ratios = result / wanted
        return bool(((ratios - 1).abs() < _RTOL_OF_NUMBER).any())
    if values.numel() > size:
        limit = _RTOL * scale
        starts = torch.nonzero((result[: -size + 1] - wanted[0]).abs() < limit).flatten()
        parts = (result[start : start + size] for start in starts[:_MAX_STARTS].tolist())
        return any(find_rms(part - wanted) < limit for part in parts)
    result_scale = find_rms(result)
    if not result_scale > 0:
        return False
    ordered, ordered_result = wanted.sort().values / scale, result.sort().values / result_scale
    return any(
        find_rms(ordered - values) < _RTOL for values in (ordered_result, -ordered_result.flip(0))
    )
