"""The values that causes are inferred from: a tensor on every rank and on the single device."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch

from shardscope.numerics import NoiseFloor, find_rms, is_finite, measure, to_fp64_on_cpu
from shardscope.parallel.equivalence import Case, Layout, TensorComparison
from shardscope.record import TensorVerdict

MAX_ELEMENTS = 2**22
"""The largest tensor that is compared in many orders and slices."""
MAX_NOISE = 0.1
"""The relative noise above which a tensor is mostly noise."""
_REST = 0.1  # the share of an error that an explanation may leave unexplained


@final
class Evidence:
    """A tensor that differs: on each rank, on the single device, and what may have been added.

    `ranks` has the full tensor of each rank, `shards` what the rank itself holds, and `target` the
    single device's result in double precision. All are float64; in `ranks` and `target` elements
    that are NaN or infinite are zero. `biases` and `inputs` are tensors of the module that may have
    been added too often, or not at all.
    """

    def __init__(
        self,
        comparison: TensorComparison,
        axes: Mapping[str, int],
        *,
        biases: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        is_forward: bool,
        batch_axes: Sequence[int],
    ) -> None:
        self.case = comparison.case
        self.layout = comparison.layout
        self.axes = axes
        self.is_forward = is_forward
        self.batch_axes = [name for index, name in enumerate(axes) if index in batch_axes]
        self.exact_target = target_in_fp64(comparison.case)
        self.target = mask_nonfinite(self.exact_target)
        self.shards = shards_in_fp64(comparison.case)
        # Integers have no noise.
        self.floor = comparison.case.floor or NoiseFloor(
            0.0, 0.0, find_rms(self.exact_target), 0.0, 1.0
        )
        vectors, residuals = (map(to_fp64_on_cpu, tensors) for tensors in (biases, inputs))
        self.biases = [bias for bias in vectors if bias.shape == self.target.shape[-1:]]
        self.inputs = [
            mask_nonfinite(tensor) for tensor in residuals if tensor.shape == self.target.shape
        ]
        self._set_ranks(comparison.full)

    def _set_ranks(self, full: Sequence[torch.Tensor]) -> None:
        self.ranks = [mask_nonfinite(to_fp64_on_cpu(tensor)) for tensor in full]
        self._off = max(measure(tensor, self.target).rms for tensor in self.ranks)

    def with_ranks(self, full: Sequence[torch.Tensor]) -> Evidence:
        """The same evidence for other full tensors, such as those of another layout of shards."""
        evidence = copy.copy(self)
        evidence._set_ranks(full)
        return evidence

    def without(self, value: torch.Tensor) -> Evidence:
        """The same evidence before a value was added to the tensor of every rank."""
        evidence = copy.copy(self)
        evidence.target = self.target - value
        evidence._set_ranks([tensor - value for tensor in self.ranks])
        return evidence

    def part(self, dim: int, start: int, end: int) -> Evidence:
        """The same evidence for some of the elements along a dim."""
        evidence = copy.copy(self)
        evidence.target = self.target.narrow(dim, start, end - start)
        evidence.inputs, evidence.biases = [], []
        evidence._set_ranks([tensor.narrow(dim, start, end - start) for tensor in self.ranks])
        return evidence

    def is_near(self, value: torch.Tensor, target: torch.Tensor, scale: float = 1.0) -> bool:
        """Whether two tensors are equal up to noise, which grows with `scale`.

        An explanation must also leave only a small share of the original error. Two tensors of
        zeros are no evidence.
        """
        distance = measure(value, target)
        is_close = self.floor.scale_by(max(scale, 1e-30) * 4).allows(distance)
        is_better = distance.rms <= _REST * self._off
        is_trivial = not bool(target.any()) and distance.largest == 0
        return is_close and is_better and not is_trivial

    def are_identical(self, groups: Sequence[Sequence[int]] | None = None) -> bool:
        """Whether the ranks of each group, or all ranks, have the same values up to noise."""
        return all(
            self.floor.allows(measure(self.ranks[rank], self.ranks[group[0]]))
            for group in groups or [range(len(self.ranks))]
            for rank in group[1:]
        )

    @property
    def scale(self) -> float:
        """The ratio of the largest rank's magnitude to the right one; at least 1."""
        largest = max(find_rms(tensor) for tensor in self.ranks)
        return max(1.0, largest / max(self.floor.scale, 1e-300))

    def groups(self) -> Iterator[tuple[tuple[str, ...], list[list[int]]]]:
        """For each set of axes, the groups of ranks that differ only along those axes."""
        return group_ranks(self.axes)

    def sharded_dims(self) -> Iterator[tuple[str, int, int]]:
        """Each axis and its size with each dim of the tensor that the axis may shard."""
        for (name, size), dim in itertools.product(self.axes.items(), range(self.target.ndim)):
            yield name, size, dim


def shards_in_fp64(case: Case) -> list[torch.Tensor]:
    """What each rank that has the tensor holds of it, in float64."""
    return [to_fp64_on_cpu(tensor) for tensor in case.ranks if tensor is not None]


def target_in_fp64(case: Case) -> torch.Tensor:
    """The result of the single device, in float64."""
    assert case.target is not None
    return to_fp64_on_cpu(case.target)


def group_ranks(axes: Mapping[str, int]) -> Iterator[tuple[tuple[str, ...], list[list[int]]]]:
    """For each set of axes, the groups of ranks that differ only along those axes."""
    sizes = tuple(axes.values())
    names = [name for name, size in axes.items() if size > 1]
    ranks = torch.arange(math.prod(sizes)).reshape(sizes)
    order = list(axes)
    for count in range(1, len(names) + 1):
        for subset in itertools.combinations(names, count):
            dims = [order.index(name) for name in subset]
            moved = ranks.movedim(dims, list(range(-count, 0)))
            lines = moved.reshape(-1, math.prod(axes[name] for name in subset))
            yield subset, lines.tolist()


def list_sizes(axes: Mapping[str, int]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Each set of axes with its number of ranks, such as (("dp", "tp"), 8)."""
    names = [name for name, size in axes.items() if size > 1]
    for count in range(1, len(names) + 1):
        for subset in itertools.combinations(names, count):
            yield subset, math.prod(axes[name] for name in subset)


def find_median_ratio(value: torch.Tensor, target: torch.Tensor) -> float | None:
    """The median ratio of the elements that are not small; None if the target is zero."""
    size = target.abs()
    if not size.numel() or not bool(size.any()):
        return None
    large = size >= size[size > 0].median()
    return float((value[large] / target[large]).median())


def mask_nonfinite(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with zeros in place of NaN and infinities."""
    return tensor if is_finite(tensor) else torch.where(torch.isfinite(tensor), tensor, 0.0)


def pair_stored(result: TensorComparison) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What each rank has of a tensor, with the same part of what it should be."""
    target = target_in_fp64(result.case)
    if result.layout is None or result.case.calls:
        full = [mask_nonfinite(tensor) for tensor in result.full_in_fp64()]
        regions = result.case.regions
        if len(regions) != len(full) or any(tensor.shape != target.shape for tensor in full):
            return [(tensor, target) for tensor in full]
        parts = [tuple(slice(*bounds) for bounds in region or ()) for region in regions]
        return [(tensor[part], target[part]) for tensor, part in zip(full, parts, strict=True)]
    shards = shards_in_fp64(result.case)
    return list(zip(shards, result.layout.split(target, shards), strict=True))


def sharding_axes(layout: Layout, axes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes that shard a tensor in this layout."""
    return tuple(name for name, dim in zip(axes, layout.dims, strict=True) if dim is not None)


def is_noise(verdict: TensorVerdict) -> bool:
    """Whether a gradient is zero up to noise, so that any factor would fit."""
    return verdict.noise is None or verdict.noise > MAX_NOISE
