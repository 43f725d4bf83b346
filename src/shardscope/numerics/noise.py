"""The distance between two tensors, and the noise floor: the distance that rounding explains."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardscope.record import Condition, Deviation

# The allowed error as a multiple of the noise. The noise of few elements is known less well, so
# a scalar gets more room than a matrix.
_MARGIN = 8.0
_SCALAR_MARGIN = 24.0
_SMALL = 1e-150  # below it, squares underflow


@final
@dataclass(frozen=True)
class Distance:
    """The distance between two tensors: root mean square and largest absolute difference."""

    rms: float
    largest: float


@final
@dataclass(frozen=True)
class NoiseFloor:
    """The error that rounding explains in a tensor, and the magnitude of its elements."""

    rms: float
    largest: float
    scale: float  # root mean square of the result in double precision
    top: float  # largest magnitude in the result in double precision
    margin: float

    def allows(self, distance: Distance) -> bool:
        """Whether rounding alone explains a distance."""
        return (
            distance.rms <= self.margin * self.rms
            and distance.largest <= self.margin * self.largest
        )

    def scale_by(self, factor: float) -> NoiseFloor:
        """The floor multiplied by a factor, for a coarser precision."""
        return replace(self, rms=self.rms * factor, largest=self.largest * factor)

    def raise_to(self, dtype: torch.dtype) -> NoiseFloor:
        """The floor of a result that is stored in `dtype`, if its rounding is coarser."""
        unit = epsilon(dtype)
        rms, largest = max(self.rms, unit * self.scale), max(self.largest, unit * self.top)
        return replace(self, rms=rms, largest=largest)


def is_inexact(tensor: torch.Tensor) -> bool:
    """Whether a tensor is floating-point or complex, so that its values are rounded."""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def epsilon(dtype: torch.dtype) -> float:
    """The machine epsilon of a dtype; 0 for integers."""
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def to_fp64_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A float64 copy on the CPU; complex tensors as pairs of real numbers."""
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.to(torch.float64)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a float64 tensor has neither NaN nor infinity, found in one pass."""
    return math.isfinite(float(tensor.sum()))


def measure(value: torch.Tensor, target: torch.Tensor) -> Distance:
    """The distance of two float64 tensors, over the elements that are finite in both."""
    off = _find_off(value, target)
    return Distance(find_rms(off), float(off.abs().max()) if off.numel() else 0.0)


def find_worst(value: torch.Tensor, target: torch.Tensor) -> int:
    """The flattened index of the element where `value` is furthest from `target`."""
    return int(_find_off(value, target).abs().argmax()) if value.numel() else 0


def _find_off(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    off = value - target
    if not is_finite(off):
        off.masked_fill_(~(torch.isfinite(value) & torch.isfinite(target)), 0.0)
    return off


def find_floor(
    reference: torch.Tensor,
    fp64: torch.Tensor | None,
    perturbed_runs: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    precision: torch.dtype,
) -> NoiseFloor:
    """The noise floor of a tensor, from the single device's runs; all tensors are float64.

    `perturbed_runs` holds, for each run with weights and inputs changed by one unit in the last
    place, the tensor in its own precision and in double precision.
    """
    target = reference if fp64 is None else fp64
    samples = [measure(reference, target)]
    for rounded, perturbed_fp64 in perturbed_runs:
        if perturbed_fp64 is None:  # the difference has the noise of both runs
            samples.append(measure(rounded, target))
        else:
            samples += [measure(rounded, perturbed_fp64), measure(perturbed_fp64, target)]
    finite = target if is_finite(target) else torch.where(torch.isfinite(target), target, 0.0)
    scale, top = find_rms(finite), float(finite.abs().max()) if finite.numel() else 0.0
    unit = epsilon(precision)
    return NoiseFloor(
        max(unit * scale, *(sample.rms for sample in samples)),
        max(unit * top, *(sample.largest for sample in samples)),
        scale,
        top,
        _MARGIN + _SCALAR_MARGIN / math.sqrt(max(1, target.numel())),
    )


def find_rms(tensor: torch.Tensor) -> float:
    """The root mean square of a float64 tensor."""
    if not tensor.numel():
        return 0.0
    rms = float(torch.linalg.vector_norm(tensor)) / math.sqrt(tensor.numel())
    if rms > _SMALL and math.isfinite(rms):
        return rms
    # Squares overflow or underflow: divide by the largest element first.
    top = float(tensor.abs().max())
    norm = float(torch.linalg.vector_norm(tensor / top)) if top > 0 else 0.0
    return top * norm / math.sqrt(tensor.numel())


Values = Mapping[str, Any]
"""What a run gave, by name: tensors, and whatever else a function returns."""
GetFp64Values = Callable[[], Values | None]
"""What the run in double precision gave, which is made when it is needed; None if none can be."""
PerturbedRuns = Callable[[int], Sequence[Values]]
"""That many runs of eager execution with other roundings, or as many as there can be."""

_SIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


def no_perturbed_runs(count: int) -> Sequence[Values]:
    """No runs, for callers that cannot repeat eager execution."""
    return ()


@final
@dataclass(frozen=True)
class Verdict:
    """The verdict on one value."""

    name: str
    condition: Condition
    fact: str = ""  # what is wrong, or more accurate
    deviation: Deviation | None = None


@final
@dataclass(frozen=True, eq=False)
class Case:
    """A tensor of the compiled function, of eager execution, and in double precision."""

    name: str
    compiled: Tensor
    eager: Tensor
    fp64: Tensor | None
    perturbed_runs: PerturbedRuns

    def run_perturbed(self, count: int) -> list[Tensor]:
        """The tensor of `count` eager runs with perturbed rounding, where the shape is the same."""
        values = [run.get(self.name) for run in self.perturbed_runs(count)]
        tensors = [dense_local(value) for value in values if isinstance(value, Tensor)]
        return [value for value in tensors if value.shape == self.eager.shape]


def dense_local(tensor: Tensor) -> Tensor:
    """A tensor that can be compared: detached, local, dense, in a dtype that has kernels."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    tensor = tensor.detach()
    if tensor.is_nested:
        return torch.cat([dense_local(component).flatten() for component in tensor.unbind()])
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    # Few kernels exist for unsigned integers of 16 bits or more; equal bits are equal numbers.
    return tensor.view(_SIGNED[tensor.dtype]) if tensor.dtype in _SIGNED else tensor
