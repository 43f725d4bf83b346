"""Which types the values of one tensor on all ranks admit, given the single device's tensor.

An assignment is a type for each mesh axis. It is admitted if the ranks' tensors, summed along the
axes with `P` and joined along those with `S(d)`, are the single device's tensor on every rank,
within its noise floor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch

from shardscope.numerics import (
    NoiseFloor,
    find_floor,
    find_rms,
    has_same_nonfinite,
    is_inexact,
    measure,
    to_fp64_on_cpu,
)
from shardscope.parallel.equivalence import Case, Layout, Order, ranks_along, shard_layouts
from shardscope.record import UNDECIDED

Assignment = tuple[str, ...]
"""The type along each mesh axis."""


@final
@dataclass(frozen=True)
class Candidates:
    """What the values of a tensor admit in one run.

    `assignments` maps each assignment that makes up the single device's tensor to the order of its
    chunks, empty for that of the ranks. `equal_axes` are those along which all ranks have the same
    values.
    """

    assignments: dict[Assignment, str]
    equal_axes: frozenset[int]


def find_candidates(case: Case, *, factor: float = 1.0) -> Candidates:
    """The assignments that a case admits; the ranks' values are divided by the factor.

    Every rank must have the tensor. Axes of size 1 are undecided.
    """
    sizes = tuple(size for size in case.sizes if size > 1)
    tensors = [_prepare(tensor) for tensor in case.ranks if tensor is not None]
    assert len(tensors) == math.prod(case.sizes), "ranks that all have the tensor"
    values = _Values(case, sizes, tensors, factor)
    large = [axis for axis, size in enumerate(case.sizes) if size > 1]
    assignments: dict[Assignment, str] = {}
    for types, order in values.list_admitted():
        full = [UNDECIDED] * len(case.sizes)
        for axis, kind in zip(large, types, strict=True):
            full[axis] = kind
        assignments.setdefault(tuple(full), order)
    equal = frozenset(large[axis] for axis in values.find_equal_axes())
    return Candidates(assignments, equal | {a for a, size in enumerate(case.sizes) if size == 1})


def _prepare(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a dtype that sums exactly, or in double precision."""
    if is_inexact(tensor):
        return to_fp64_on_cpu(tensor)
    return tensor.detach().cpu().to(torch.int64)


@final
class _Values:
    """One tensor on all ranks, along the axes with more than one rank."""

    def __init__(
        self, case: Case, sizes: tuple[int, ...], tensors: Sequence[torch.Tensor], factor: float
    ) -> None:
        self._case = case
        self._sizes = sizes
        self._tensors = tensors if factor == 1.0 else [tensor / factor for tensor in tensors]
        self._is_summable = all(
            tensor.dtype != torch.bool for tensor in case.ranks if tensor is not None
        )
        self._target = None if case.target is None else _prepare(case.target)
        self._sums: dict[frozenset[int], list[torch.Tensor]] = {frozenset(): list(self._tensors)}
        self._floor = self._find_floor()

    def _find_floor(self) -> NoiseFloor | None:
        """The noise floor of the tensor, raised to that of its parts; None for integers."""
        first = self._tensors[0]
        if not is_inexact(first):
            return None
        dtype = next(tensor.dtype for tensor in self._case.ranks if tensor is not None)
        parts = [
            find_floor(torch.nan_to_num(tensor), None, (), dtype)
            for tensor in self._tensors
            if tensor.numel()
        ]
        own = self._case.floor
        floors = [*parts, *([] if own is None else [own])]
        if not floors:
            return find_floor(first, None, (), dtype)
        return replace(
            max(floors, key=lambda floor: floor.margin),
            rms=max(floor.rms for floor in floors),
            largest=max(floor.largest for floor in floors),
        )

    def list_admitted(self) -> Iterator[tuple[Assignment, str]]:
        """The assignments that make up the single device's tensor, with the order of chunks."""
        if self._target is None:
            return
        is_found = False
        for is_mean in (False, True):
            for layouts in self._list_layouts():
                for layout in layouts:
                    for partial in self._list_partial_axes(layout, is_mean=is_mean):
                        if self._is_admitted(layout, partial, is_mean=is_mean):
                            is_found = True
                            yield _name(layout, self._sizes, partial, is_mean=is_mean)
                if is_found:
                    return

    def _list_layouts(self) -> Iterator[list[Layout | None]]:
        """The layouts that fit, in order of preference: contiguous chunks first, then others."""
        assert self._target is not None
        if all(tensor.shape == self._target.shape for tensor in self._tensors):
            yield [None]
            return
        layouts = list(shard_layouts(self._tensors, self._target.shape, self._sizes))
        yield [layout for layout in layouts if not _name_order(layout)]
        yield [layout for layout in layouts if _name_order(layout)]

    def _list_partial_axes(
        self, layout: Layout | None, *, is_mean: bool
    ) -> Iterator[frozenset[int]]:
        """The sets of axes that may be summed, or averaged: those that the layout leaves free.

        The mean of equal values is these values, so only others are averaged.
        """
        equal = set(self.find_equal_axes()) if is_mean else set()
        free = [
            axis
            for axis in range(len(self._sizes))
            if axis not in equal and (layout is None or layout.dims[axis] is None)
        ]
        for count in range(1 if is_mean else 0, len(free) + 1 if self._is_summable else 1):
            for axes in itertools.combinations(free, count):
                if not is_mean or is_inexact(self._tensors[0]):
                    yield frozenset(axes)

    def _is_admitted(
        self, layout: Layout | None, partial: frozenset[int], *, is_mean: bool
    ) -> bool:
        parts = self._sum(partial)
        if parts is None:
            return False
        if is_mean:
            count = math.prod(self._sizes[axis] for axis in partial)
            parts = [part / count for part in parts]
        full = parts if layout is None else layout.join(parts)
        return full is not None and all(self._is_target(tensor) for tensor in _distinct(full))

    def _sum(self, axes: frozenset[int]) -> list[torch.Tensor] | None:
        """Each rank's tensor, summed along the axes; None if their shapes differ."""
        if axes not in self._sums:
            axis = max(axes)
            parts = self._sum(axes - {axis})
            if parts is None:
                return None
            sums = list(parts)
            for line in ranks_along(self._sizes, axis):
                if len({parts[rank].shape for rank in line}) > 1:
                    return None
                total = torch.stack([parts[rank] for rank in line]).sum(0)
                for rank in line:
                    sums[rank] = total
            self._sums[axes] = sums
        return self._sums[axes]

    def _is_target(self, tensor: torch.Tensor) -> bool:
        assert self._target is not None
        return tensor.shape == self._target.shape and self._is_near(tensor, self._target)

    def _is_near(self, tensor: torch.Tensor, target: torch.Tensor) -> bool:
        if self._floor is None or not is_inexact(target):
            return torch.equal(tensor, target)
        is_same = has_same_nonfinite(tensor, target)
        return is_same and self._floor.allows(measure(tensor, target))

    def find_equal_axes(self) -> Iterator[int]:
        """The axes along which all ranks have the same values."""
        for axis in range(len(self._sizes)):
            lines = ranks_along(self._sizes, axis)
            if all(
                self._tensors[rank].shape == self._tensors[line[0]].shape
                and self._is_near(self._tensors[rank], self._tensors[line[0]])
                for line in lines
                for rank in line[1:]
            ):
                yield axis


def _name(
    layout: Layout | None, sizes: Sequence[int], partial: frozenset[int], *, is_mean: bool
) -> tuple[Assignment, str]:
    dims = (None,) * len(sizes) if layout is None else layout.dims
    summed = "P(avg)" if is_mean else "P"
    types = tuple(
        summed if axis in partial else "R" if dim is None else f"S({dim})"
        for axis, dim in enumerate(dims)
    )
    return types, "" if layout is None else _name_order(layout)


def _name_order(layout: Layout) -> str:
    """How chunks are distributed, where that is not the order of the ranks."""
    orders = {str(order) for order in layout.orders if order is not Order.CONTIGUOUS}
    if layout.num_rows > 1:
        orders.add("rows")
    if layout.is_strided:
        orders.add("strided")
    return ", ".join(sorted(orders))


def _distinct(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def is_zero(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether no rank has an element that is not zero."""
    present = [tensor for tensor in tensors if tensor is not None and tensor.numel()]
    return not any(find_rms(to_fp64_on_cpu(tensor)) for tensor in present)
