"""How far apart two tensors are, and how far apart they may be.

A result is held to what the single device itself is off from double precision, and to what it
moves by when weights and inputs change in their last place: never to a tolerance of our own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch

__all__ = [
    "Distance",
    "Floor",
    "as_exact",
    "epsilon",
    "find_floor",
    "find_rms",
    "find_worst",
    "is_finite",
    "is_inexact",
    "measure",
]

# How many times its noise a result may be off. Few elements tell little of the noise they came
# from, so that a single number gets more room than a matrix.
_MARGIN = 8.0
_MARGIN_OF_ONE = 24.0
_SMALL = 1e-150  # numbers whose squares are none


@final
@dataclass(frozen=True)
class Distance:
    """Of one tensor from another: root mean square, and largest."""

    rms: float
    largest: float


@final
@dataclass(frozen=True)
class Floor:
    """What a tensor may be off by, and the size of its numbers."""

    rms: float
    largest: float
    scale: float  # root mean square of the exact result
    top: float  # largest magnitude in the exact result
    margin: float

    def allows(self, distance: Distance) -> bool:
        """Whether a distance is one of rounding alone."""
        return (
            distance.rms <= self.margin * self.rms
            and distance.largest <= self.margin * self.largest
        )

    def at(self, factor: float) -> Floor:
        """The floor of a precision whose last place is that many times as large."""
        return replace(self, rms=self.rms * factor, largest=self.largest * factor)

    def raise_to(self, dtype: torch.dtype) -> Floor:
        """The floor of a result that is stored in this dtype, if its rounding is coarser."""
        unit = epsilon(dtype)
        rms, largest = max(self.rms, unit * self.scale), max(self.largest, unit * self.top)
        return replace(self, rms=rms, largest=largest)


def is_inexact(tensor: torch.Tensor) -> bool:
    """Whether its numbers are rounded."""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def epsilon(dtype: torch.dtype) -> float:
    """The relative distance of two neighbouring numbers."""
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def as_exact(tensor: torch.Tensor) -> torch.Tensor:
    """Its numbers in double precision, real ones, on the host."""
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.to(torch.float64)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether an exact tensor has neither NaN nor infinity; in one pass."""
    return math.isfinite(float(tensor.sum()))


def measure(value: torch.Tensor, target: torch.Tensor) -> Distance:
    """How far `value` is from `target`, both exact, where both are finite."""
    off = _find_off(value, target)
    return Distance(find_rms(off), float(off.abs().max()) if off.numel() else 0.0)


def find_worst(value: torch.Tensor, target: torch.Tensor) -> int:
    """Where `value` is furthest from `target`, as an index into them flattened."""
    return int(_find_off(value, target).abs().argmax()) if value.numel() else 0


def _find_off(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    off = value - target
    if not is_finite(off):
        off.masked_fill_(~(torch.isfinite(value) & torch.isfinite(target)), 0.0)
    return off


def find_floor(
    reference: torch.Tensor,
    exact: torch.Tensor | None,
    jittered: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    precision: torch.dtype,
) -> Floor:
    """The floor for one tensor, from the runs of the single device; all are as `as_exact` makes.

    `jittered` are runs with weights and inputs changed in their last place, as it was and exact.
    """
    target = reference if exact is None else exact
    samples = [measure(reference, target)]
    for rounded, other in jittered:
        if other is None:  # half of it is each run's own noise
            samples.append(measure(rounded, target))
        else:
            samples += [measure(rounded, other), measure(other, target)]
    finite = target if is_finite(target) else torch.where(torch.isfinite(target), target, 0.0)
    scale, top = find_rms(finite), float(finite.abs().max()) if finite.numel() else 0.0
    unit = epsilon(precision)
    return Floor(
        max(unit * scale, *(one.rms for one in samples)),
        max(unit * top, *(one.largest for one in samples)),
        scale,
        top,
        _MARGIN + _MARGIN_OF_ONE / math.sqrt(max(1, target.numel())),
    )


def find_rms(tensor: torch.Tensor) -> float:
    """The root mean square of an exact tensor."""
    if not tensor.numel():
        return 0.0
    rms = float(torch.linalg.vector_norm(tensor)) / math.sqrt(tensor.numel())
    if rms > _SMALL and math.isfinite(rms):
        return rms
    # Squares overflow, or vanish: take them of the largest.
    top = float(tensor.abs().max())
    norm = float(torch.linalg.vector_norm(tensor / top)) if top > 0 else 0.0
    return top * norm / math.sqrt(tensor.numel())
