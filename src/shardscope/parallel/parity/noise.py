"""How far apart two tensors are, and how far apart they may be.

A result is held to what the single device itself is off from double precision, and to what it
moves by when weights and inputs change in their last place: never to a tolerance of our own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

__all__ = ["Distance", "Floor", "as_exact", "epsilon", "find_floor", "is_inexact", "measure"]

# How many times its noise a result may be off. Few elements tell little of the noise they came
# from, so that a single number gets more room than a matrix.
_MARGIN = 8.0
_MARGIN_OF_ONE = 24.0


@final
@dataclass(frozen=True)
class Distance:
    """Of one tensor from another: root mean square, largest, and where that is."""

    rms: float
    largest: float
    worst: int  # index into the flattened tensor


@final
@dataclass(frozen=True)
class Floor:
    """What a tensor may be off by, and the size of its numbers."""

    rms: float
    largest: float
    scale: float  # root mean square of the exact result
    margin: float

    def allows(self, distance: Distance) -> bool:
        """Whether a distance is one of rounding alone."""
        return (
            distance.rms <= self.margin * self.rms
            and distance.largest <= self.margin * self.largest
        )

    def at(self, factor: float) -> Floor:
        """The floor of a precision whose last place is that many times as large."""
        return Floor(self.rms * factor, self.largest * factor, self.scale, self.margin)


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


def measure(value: torch.Tensor, target: torch.Tensor) -> Distance:
    """How far `value` is from `target`, both exact, where both are finite."""
    off = (value - target).abs_()
    off.masked_fill_(~(torch.isfinite(value) & torch.isfinite(target)), 0.0)
    if not off.numel():
        return Distance(0.0, 0.0, 0)
    worst = int(off.argmax())
    return Distance(_rms(off), float(off.flatten()[worst]), worst)


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
    finite = torch.where(torch.isfinite(target), target, 0.0).abs()
    scale, top = _rms(finite), float(finite.max()) if finite.numel() else 0.0
    unit = epsilon(precision)
    return Floor(
        max(unit * scale, *(one.rms for one in samples)),
        max(unit * top, *(one.largest for one in samples)),
        scale,
        _MARGIN + _MARGIN_OF_ONE / math.sqrt(max(1, target.numel())),
    )


def _rms(tensor: torch.Tensor) -> float:
    if not tensor.numel():
        return 0.0
    top = float(tensor.abs().max())
    # Of the largest, so that squares neither overflow nor vanish.
    return top * float((tensor / top).square().mean().sqrt()) if top > 0 else 0.0
