"""Statistics of tensors, computed on their device and read once per step.

A read of one value waits for the device. `StatisticsBuffer.add` only launches kernels, and `read`
copies all results at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import torch

_ROW = 1 << 10  # elements of a row, where a tensor has no dim to take rows from
_MIN_ROW = 16
_NUM_FIGURES = 4  # of a tensor: sum, sum of squares, maximum, minimum
_HASH_MASK = (1 << 64) - 1
_HASH_PRIMES = 0x100000001B3, 0x9E3779B97F4A7C15 >> 1  # of rows and of columns
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Statistics:
    """Figures of one tensor; sums are None if they are not finite."""

    sum: float | None
    sum_squares: float | None
    max_abs: float | None
    num_nonfinite: int
    hash: str


@final
class StatisticsBuffer:
    """Figures of many tensors that are still on the device, as 0-dim tensors.

    Nothing of the size of a tensor is allocated, except for integers.
    """

    def __init__(self) -> None:
        self._figures: list[torch.Tensor] = []
        self._hashes: list[torch.Tensor] = []
        self._counts: list[torch.Tensor | int] = []  # of nonfinite values
        self._is_empty: list[bool] = []
        self._places: dict[tuple[torch.device, int], torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._is_empty)

    def add(self, tensor: torch.Tensor) -> int:
        """Compute the figures of a plain tensor with data; returns its number in `read`."""
        self._is_empty.append(not tensor.numel())
        if tensor.numel():
            matrix = _view_rows(_make_real(tensor.detach()))
            values = matrix if matrix.is_floating_point() else matrix.to(torch.float64)
            total = torch.float64 if values.dtype is torch.float64 else torch.float32
            minimum, maximum = values.amin(), values.amax()
            self._figures += [
                values.sum(dtype=total),
                _sum_squares(values, total),
                maximum.to(total),
                minimum.to(total),
            ]
            self._counts.append(_count_nonfinite(values, maximum, minimum))
            self._add_hash(matrix)
        return len(self._is_empty) - 1

    def _add_hash(self, matrix: torch.Tensor) -> None:
        """Sums of the bits of rows and of columns, each times a factor by position."""
        bits = matrix.view(_BITS[matrix.element_size()])
        # Sums of int32 wrap, and cost a tenth of those of int64 on CPUs.
        total = torch.int64 if bits.dtype is torch.int64 else torch.int32
        for dim in (1, 0):
            sums = bits.sum(dim=dim, dtype=total)
            self._hashes.append((sums * self._find_places(matrix.device, len(sums))).sum())

    def _find_places(self, device: torch.device, count: int) -> torch.Tensor:
        if (device, count) not in self._places:
            places = torch.arange(1, count + 1, device=device)
            self._places[device, count] = places * 0x9E3779B1 % 0x7FFFFFFF
        return self._places[device, count]

    def read(self) -> list[Statistics]:
        """The figures of all tensors, in the order in which they were added; empties the buffer."""
        figures = _copy_to_host(self._figures)
        hashes = _copy_to_host(self._hashes)
        counts = iter(_read_counts(self._counts))
        results, number = [], 0
        for is_empty in self._is_empty:
            if is_empty:
                results.append(Statistics(0.0, 0.0, 0.0, 0, f"{0:016x}"))
                continue
            own = figures[_NUM_FIGURES * number : _NUM_FIGURES * (number + 1)]
            bits = sum(
                prime * value
                for prime, value in zip(
                    _HASH_PRIMES, hashes[2 * number : 2 * number + 2], strict=True
                )
            )
            results.append(_combine(own, next(counts), bits))
            number += 1
        self._figures, self._hashes, self._counts, self._is_empty = [], [], [], []
        return results


def _view_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a matrix: its last dim as rows, or rows of 1,024 elements, or one row."""
    if tensor.dtype is torch.bool:
        tensor = tensor.view(torch.uint8)
    if tensor.dim() > 1 and tensor.shape[-1] >= _MIN_ROW:
        return tensor.reshape(-1, tensor.shape[-1])
    return tensor.reshape(-1, _ROW if tensor.numel() % _ROW == 0 else tensor.numel())


def _sum_squares(values: torch.Tensor, total: torch.dtype) -> torch.Tensor:
    """The sum of squares; long sums of float32 on CPUs are made of those of rows."""
    if values.is_cuda:
        norm: torch.Tensor = torch.linalg.vector_norm(values, dtype=total)
        return norm.square()
    if len(values) == 1 and values.numel() > 4 * _ROW:
        return values.to(torch.float64).square().sum().to(total)
    rows: torch.Tensor = torch.linalg.vector_norm(values, dim=1, dtype=total)
    return rows.square().sum()


def _count_nonfinite(
    values: torch.Tensor, maximum: torch.Tensor, minimum: torch.Tensor
) -> torch.Tensor | int:
    """How many values are NaN or infinite; on a device, to wait for nothing, at least one."""
    if not values.is_cpu:
        return (~torch.isfinite(maximum - minimum)).to(torch.int32)
    largest, smallest = float(maximum), float(minimum)
    if math.isfinite(largest) and math.isfinite(smallest):
        return 0
    return int((~values.isfinite()).sum())


def _read_counts(counts: list[torch.Tensor | int]) -> list[int]:
    tensors = [count for count in counts if isinstance(count, torch.Tensor)]
    values = iter(_copy_to_host(tensors))
    return [int(next(values)) if isinstance(count, torch.Tensor) else count for count in counts]


def _make_real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _copy_to_host(tensors: list[torch.Tensor]) -> list[Any]:
    """The values of 0-dim tensors, with one wait for each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    results: list[Any] = [None] * len(tensors)
    for indices in groups.values():
        values = torch.stack([tensors[index] for index in indices]).cpu().tolist()
        for index, value in zip(indices, values, strict=True):
            results[index] = value
    return results


def _combine(figures: list[float], num_nonfinite: int, bits: int) -> Statistics:
    total, squares, maximum, minimum = figures
    return Statistics(
        sum=_keep_finite(total),
        sum_squares=_keep_finite(squares),
        max_abs=_keep_finite(max(abs(maximum), abs(minimum))),
        num_nonfinite=num_nonfinite,
        hash=f"{bits & _HASH_MASK:016x}",
    )


def _keep_finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
