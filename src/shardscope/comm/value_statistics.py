"""Statistics of tensors, computed on their device and read once per step.

A read of one value waits for the device. `StatisticsBuffer.add` only launches kernels, and `read`
copies all results at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import torch

_SLICE = 1 << 20  # elements; bounds the memory that is needed for one tensor
_ROW = 1 << 10  # elements that are hashed with the same row factor
_NUM_FIGURES = 5  # of a slice: sum, sum of squares, minimum, maximum, number of nonfinite values
_HASH_MASK = (1 << 64) - 1
_HASH_PRIME = 0x100000001B3
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
    """Figures of many tensors that are still on the device, as 0-dim tensors."""

    def __init__(self) -> None:
        self._figures: list[torch.Tensor] = []
        self._hashes: list[torch.Tensor] = []
        self._num_slices: list[int] = []
        self._factors: dict[torch.device, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._num_slices)

    def add(self, tensor: torch.Tensor) -> int:
        """Compute the figures of a plain tensor with data; returns its number in `read`."""
        flat = _make_real(tensor.detach()).reshape(-1)
        num_slices = 0
        for start in range(0, flat.numel(), _SLICE):
            self._add_slice(flat[start : start + _SLICE])
            num_slices += 1
        self._num_slices.append(num_slices)
        return len(self._num_slices) - 1

    def _add_slice(self, flat: torch.Tensor) -> None:
        values = _widen(flat)
        squares = values * values
        minimum, maximum = torch.aminmax(values)
        figures = (
            values.sum(),
            squares.sum(),
            minimum,
            maximum,
            torch.count_nonzero(torch.mul(values, 0, out=squares)),  # NaN where not finite
        )
        self._figures.append(torch.stack([figure.to(torch.float64) for figure in figures]))
        self._hashes.append(self._hash(flat))

    def _hash(self, flat: torch.Tensor) -> torch.Tensor:
        """A sum of the bits of each element times a factor that depends on its position."""
        bits = flat.view(_BITS[flat.element_size()])
        if bits.element_size() < 4:
            bits = bits.to(torch.int32)
        factors = self._find_factors(flat.device).to(bits.dtype)
        num_rows = bits.numel() // _ROW
        head, tail = bits[: num_rows * _ROW].view(num_rows, _ROW), bits[num_rows * _ROW :]
        rows = (head * factors).sum(dim=1, dtype=torch.int64)
        rows = torch.cat([rows, (tail * factors[: tail.numel()]).sum(dtype=torch.int64)[None]])
        places = torch.arange(1, rows.numel() + 1, device=flat.device)
        return (rows * (places * _HASH_PRIME)).sum()

    def _find_factors(self, device: torch.device) -> torch.Tensor:
        """Odd numbers by position in a row, from a generator that is not the program's."""
        if device not in self._factors:
            numbers, state = [], 0x9E3779B9
            for _ in range(_ROW):
                state = (state * 1_664_525 + 1_013_904_223) % (1 << 32)
                numbers.append(((state >> 8) | 1) & 0x7FFFFF)
            self._factors[device] = torch.tensor(numbers, dtype=torch.int32, device=device)
        return self._factors[device]

    def read(self) -> list[Statistics]:
        """The figures of all tensors, in the order in which they were added; empties the buffer."""
        figures = _copy_to_host(self._figures)
        hashes = _copy_to_host(self._hashes)
        results, start = [], 0
        for num_slices in self._num_slices:
            part = slice(start, start + num_slices)
            results.append(_combine(figures[part], hashes[part]))
            start += num_slices
        self._figures, self._hashes, self._num_slices = [], [], []
        return results


def _make_real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _widen(flat: torch.Tensor) -> torch.Tensor:
    """The values as float32, or as float64 if they do not fit: it sums integers exactly."""
    if not flat.is_floating_point() or flat.dtype is torch.float64:
        return flat.to(torch.float64)
    return flat.to(torch.float32)


def _copy_to_host(tensors: list[torch.Tensor]) -> list[Any]:
    """The values of tensors of one shape as numbers or lists, with one wait per device."""
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(index)
    results: list[Any] = [None] * len(tensors)
    for indices in by_device.values():
        rows = torch.stack([tensors[index] for index in indices]).cpu().tolist()
        for index, row in zip(indices, rows, strict=True):
            results[index] = row
    return results


def _combine(figures: list[list[float]], hashes: list[int]) -> Statistics:
    if not figures:
        return Statistics(0.0, 0.0, 0.0, 0, f"{0:016x}")
    sums, squares, minima, maxima, counts = zip(*figures, strict=True)
    value = 0
    for number in hashes:
        value = (value * _HASH_PRIME + number) & _HASH_MASK
    return Statistics(
        sum=_keep_finite(sum(sums)),
        sum_squares=_keep_finite(sum(squares)),
        max_abs=_keep_finite(max(map(abs, (*minima, *maxima)))),
        num_nonfinite=round(sum(counts)),
        hash=f"{value:016x}",
    )


def _keep_finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
