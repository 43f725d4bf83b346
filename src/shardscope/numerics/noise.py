"""The error that rounding explains: of a tensor, as a noise floor, and of each of its elements.

The noise floor (`NoiseFloor`) has one limit for the root mean square of the error and one for its
largest element. Parity uses it, since sharding changes the order of every sum. `Bounds` has a limit
for each element. Diagnose uses it, since a compiler may get a few elements wrong. Both are measured
rather than chosen: from the same computation in double precision, and with perturbed rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# The allowed error as a multiple of the noise. The noise of few elements is known less well, so
# a scalar gets more room than a matrix.
_MARGIN = 8.0
_SCALAR_MARGIN = 24.0
_SMALL = 1e-150  # below it, squares underflow

_SIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


def is_inexact(tensor: Tensor) -> bool:
    """Whether a tensor is floating-point or complex, so that its values are rounded."""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def epsilon(dtype: torch.dtype) -> float:
    """The machine epsilon of a dtype; 0 for integers."""
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def to_fp64_on_cpu(tensor: Tensor) -> Tensor:
    """A float64 copy on the CPU; complex tensors as pairs of real numbers."""
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.to(torch.float64)


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


def is_finite(tensor: Tensor) -> bool:
    """Whether a float64 tensor has neither NaN nor infinity, found in one pass."""
    return math.isfinite(float(tensor.sum()))


def is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two dense tensors of one shape and dtype are equal; NaN equals NaN."""
    if a.dtype.itemsize > 1 and bool(torch.equal(a, b)):
        return True
    if not is_inexact(a):
        return bool(torch.equal(a, b))
    first, second = to_fp64_on_cpu(a), to_fp64_on_cpu(b)
    return bool(((first == second) | (torch.isnan(first) & torch.isnan(second))).all())


def classify_nonfinite(tensor: Tensor) -> Tensor:
    """For each element of a float64 tensor: 0 if finite, 1 for NaN, 2 for +inf, 3 for -inf."""
    kinds = torch.isnan(tensor).to(torch.int8)
    return kinds + 2 * (tensor == torch.inf).to(torch.int8) + 3 * (tensor == -torch.inf)


def has_same_nonfinite(value: Tensor, target: Tensor) -> bool:
    """Whether two float64 tensors have NaN, and each infinity, at the same elements."""
    if is_finite(value) and is_finite(target):
        return True
    return torch.equal(classify_nonfinite(value), classify_nonfinite(target))


def unravel(flat_index: int, tensor: Tensor) -> tuple[int, ...]:
    """The index of an element of `tensor`, from its index in the flattened float64 tensor."""
    if tensor.is_complex():
        flat_index //= 2  # real and imaginary parts alternate
    if not tensor.numel():
        return ()
    indices = torch.unravel_index(torch.tensor(flat_index), tensor.shape)
    return tuple(int(index) for index in indices)


def find_rms(tensor: Tensor) -> float:
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


@final
@dataclass(frozen=True)
class Distance:
    """The distance between two tensors: root mean square and largest absolute difference."""

    rms: float
    largest: float


def measure(value: Tensor, target: Tensor) -> Distance:
    """The distance of two float64 tensors, over the elements that are finite in both."""
    off = _subtract_finite(value, target)
    return Distance(find_rms(off), float(off.abs().max()) if off.numel() else 0.0)


def find_worst(value: Tensor, target: Tensor) -> int:
    """The flattened index of the element where `value` is furthest from `target`."""
    return int(_subtract_finite(value, target).abs().argmax()) if value.numel() else 0


def _subtract_finite(value: Tensor, target: Tensor) -> Tensor:
    off = value - target
    if not is_finite(off):
        off.masked_fill_(~(torch.isfinite(value) & torch.isfinite(target)), 0.0)
    return off


@final
@dataclass(frozen=True)
class NoiseFloor:
    """The error that rounding explains in a tensor, and the magnitude of its elements."""

    rms: float
    largest: float
    scale: float  # root mean square of the result in double precision
    top: float  # largest magnitude in the result in double precision
    margin: float  # how many times the noise a distance may be

    def allows(self, distance: Distance) -> bool:
        """Whether rounding alone explains a distance."""
        return (
            distance.rms <= self.margin * self.rms
            and distance.largest <= self.margin * self.largest
        )

    def covers(self, value: Tensor, target: Tensor) -> bool:
        """Whether rounding explains the distance of two tensors of one shape, of any dtype.

        Elements that are NaN or infinite in either are left out.
        """
        return self.allows(measure(to_fp64_on_cpu(value), to_fp64_on_cpu(target)))

    def scale_by(self, factor: float) -> NoiseFloor:
        """The floor multiplied by a factor, for a coarser precision."""
        return replace(self, rms=self.rms * factor, largest=self.largest * factor)

    def raise_to(self, dtype: torch.dtype) -> NoiseFloor:
        """The floor of a result that is stored in `dtype`, if its rounding is coarser."""
        unit = epsilon(dtype)
        rms, largest = max(self.rms, unit * self.scale), max(self.largest, unit * self.top)
        return replace(self, rms=rms, largest=largest)


def find_floor(
    reference: Tensor,
    fp64: Tensor | None,
    perturbed_runs: Sequence[tuple[Tensor, Tensor | None]],
    precision: torch.dtype,
) -> NoiseFloor:
    """The noise floor of a tensor, from runs of the original; all tensors are float64.

    `reference` is the result in its own precision, `fp64` in double precision, if known.
    `perturbed_runs` holds the same pair for runs with perturbed weights, inputs or rounding.
    `precision` is the dtype whose machine epsilon is the least noise.
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


_OTHER_PROGRAM = 1e3  # times the noise of a precision by which another one is a different program


def find_own_floor(
    reference: Tensor, fp64: Tensor, perturbed_runs: Sequence[Tensor], precision: torch.dtype
) -> NoiseFloor | None:
    """The noise floor of `reference` in its own precision, if double precision differs by far more.

    Such as where the original computes something else in it, because it asks for the dtype. None if
    rounding may explain the difference to `fp64`. All tensors are float64; `perturbed_runs` are in
    the original's own precision.
    """
    floor = find_floor(
        reference, None, [(perturbed, None) for perturbed in perturbed_runs], precision
    )
    is_other = measure(reference, fp64).rms > _OTHER_PROGRAM * floor.rms > 0
    return floor if is_other else None


_LAST_PLACES = 2.0  # units in the last place that an element may always be off by
_OWN = 2.0  # times the error of eager execution at the same element
_POOLED = 12.0  # times the typical error of elements of similar magnitude
_SPREAD = 4.0  # times the change that perturbed rounding makes to the same element
_RMS = 2.0
_SCALAR_RMS = 24.0  # the noise of few elements is known less well, so they get more room
_ROUNDING = 0.3  # root mean square of one rounding, in units in the last place
_GROSS = 1e3  # times the bound: more than perturbed rounding can explain
_ENOUGH = 64  # elements; with fewer, the share of failing elements is no evidence
_NUM_EXPONENTS = 2400  # exponents of double precision


@final
@dataclass(frozen=True, eq=False)
class Bounds:
    """The allowed error: of each element, of the root mean square, and of a few further elements.

    Where the function is discontinuous (it compares nearly equal numbers), runs with perturbed
    rounding differ in elements of their own. So up to `num_jumps` elements may exceed `each`,
    by at most `jump`.
    """

    each: Tensor
    rms: float
    num_jumps: int = 0
    jump: float = 0.0

    def find_failures(self, off: Tensor) -> Tensor:
        """A mask of the wrong elements of a result whose absolute error is `off`."""
        failing = off > self.each
        num_failing = int(failing.sum())
        is_jumpy = 0 < num_failing <= self.num_jumps
        if is_jumpy and float(off[failing].max()) <= self.jump:
            failing = torch.zeros_like(failing)
            off = torch.where(off > self.each, 0.0, off)
        if not bool(failing.any()) and find_rms(off) > self.rms:
            # Each error could be noise, but their root mean square is too large.
            return off > self.rms
        return failing

    def is_conclusive(self, off: Tensor, failing: Tensor) -> bool:
        """Whether more samples cannot change the verdict: over half of the elements are far off."""
        if off.numel() < _ENOUGH:
            return False
        return 2 * int((failing & (off > _GROSS * self.each)).sum()) > off.numel()

    def is_sample_limited(self, failing: Tensor) -> bool:
        """Whether many samples could decide what a few did not: few elements, or few failures."""
        return failing.numel() < _ENOUGH or 8 * int(failing.sum()) < failing.numel()


def find_bounds(
    eager: Tensor, target: Tensor, samples: Sequence[Tensor], dtype: torch.dtype
) -> Bounds:
    """The bounds of a result, from eager execution and `samples` of it with perturbed rounding.

    `target` is the result in double precision. All tensors are float64, without NaN or
    infinity; `dtype` is the dtype in which eager execution computed.
    """
    error = (eager - target).abs()
    exponents = _exponents_of(target)
    unit = _last_place(target, dtype)
    each = _LAST_PLACES * unit + _OWN * error + _POOLED * _pool(error, exponents)
    noise, floor = find_rms(error), _ROUNDING * find_rms(unit)
    if not samples:
        return Bounds(each, _limit_rms(noise, floor, error.numel()))
    noise = max(noise, *(find_rms(sample - target) for sample in samples))
    limit = _limit_rms(noise, floor, error.numel())
    moved = torch.stack([(sample - eager).abs() for sample in samples])
    spread = moved.amax(0)
    bound = each + _SPREAD * spread + _POOLED * _pool(spread, exponents)
    return Bounds(bound, limit, *_find_jumps(moved, each, exponents))


def _limit_rms(noise: float, floor: float, count: int) -> float:
    few = 1 / math.sqrt(max(1, count))
    return (_RMS + _SCALAR_RMS * few) * noise + floor * (1 + _SCALAR_RMS * few)


def _last_place(target: Tensor, dtype: torch.dtype) -> Tensor:
    eps = epsilon(dtype)
    return (target.abs() * eps).clamp(min=torch.finfo(dtype).smallest_normal * eps)


def _exponents_of(target: Tensor) -> Tensor:
    """The exponent of each element as an index below `_NUM_EXPONENTS`; flattened."""
    _, exponent = torch.frexp(target.flatten())
    known = torch.where(target.flatten() == 0, -_NUM_EXPONENTS // 2, exponent.long())
    return known.clamp_(-_NUM_EXPONENTS // 2, _NUM_EXPONENTS // 2 - 1).add_(_NUM_EXPONENTS // 2)


def _pool(error: Tensor, exponents: Tensor) -> Tensor:
    """For each element, the typical error of the elements of similar magnitude.

    Square roots are averaged, so that a single large error does not dominate.
    """
    sums = torch.zeros(_NUM_EXPONENTS, dtype=torch.float64, device=error.device)
    counts = torch.zeros_like(sums)
    sums.index_add_(0, exponents, error.flatten().sqrt())
    counts.index_add_(0, exponents, torch.ones_like(error.flatten()))
    typical = _add_neighbours(sums) / _add_neighbours(counts).clamp(min=1)
    return typical.square()[exponents].view(error.shape)


def _add_neighbours(row: Tensor) -> Tensor:
    # A convolution would do the same, but takes a hundred times as long.
    wide = torch.nn.functional.pad(row, (1, 1))
    return wide[:-2] + wide[1:-1] + wide[2:]


def _find_jumps(moved: Tensor, each: Tensor, exponents: Tensor) -> tuple[int, float]:
    """How many elements a further run would change by far, and by how much.

    Estimated from the elements that only a single run changed by far.
    """
    num_runs = len(moved)
    if num_runs < 3:
        return 0, 0.0
    first, second = moved.topk(2, dim=0).values
    is_alone = first > each + _SPREAD * second + _POOLED * _pool(second, exponents)
    num_alone = int(is_alone.sum())
    if not num_alone:
        return 0, 0.0
    return int(_SPREAD * num_alone / num_runs), _OWN * float(first[is_alone].max())
