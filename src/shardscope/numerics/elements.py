"""Compares floating-point tensors element by element, with an error bound for each element.

The bound of an element comes from the error of eager execution, measured in double precision, and
from eager runs with perturbed rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from msgspec import structs
from torch import Tensor

from shardscope.numerics.noise import Case, Verdict, epsilon, find_rms, is_finite, to_fp64_on_cpu
from shardscope.record import Condition, Deviation

_LAST_PLACES = 2.0  # units in the last place that an element may always be off by
_OWN = 2.0  # times the error of eager execution at the same element
_POOLED = 12.0  # times the typical error of elements of similar magnitude
_SPREAD = 4.0  # times the change that perturbed rounding makes to the same element
_RMS = 2.0
_SCALAR_RMS = 24.0  # the noise of few elements is known less well, so they get more room
_ROUNDING = 0.3  # root mean square of one rounding, in units in the last place
_GROSS = 1e3  # times the bound: more than perturbed rounding can explain
_ENOUGH = 64  # elements; with fewer, the share of failing elements is no evidence
_NUM_SIZES = 2400  # exponents of double precision


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
            return (
                off > self.rms
            )  # each error could be noise, but their root mean square is too large
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
    infinity.
    """
    error = (eager - target).abs()
    sizes = _sizes_of(target)
    unit = _last_place(target, dtype)
    each = _LAST_PLACES * unit + _OWN * error + _POOLED * _pool(error, sizes)
    noise, floor = find_rms(error), _ROUNDING * find_rms(unit)
    if not samples:
        return Bounds(each, _limit_rms(noise, floor, error.numel()))
    noise = max(noise, *(find_rms(sample - target) for sample in samples))
    limit = _limit_rms(noise, floor, error.numel())
    moved = torch.stack([(sample - eager).abs() for sample in samples])
    spread = moved.amax(0)
    bound = each + _SPREAD * spread + _POOLED * _pool(spread, sizes)
    return Bounds(bound, limit, *_find_jumps(moved, each, sizes))


def classify_nonfinite(tensor: Tensor) -> Tensor:
    """For each element of a float64 tensor: 0 if finite, 1 for NaN, 2 for +inf, 3 for -inf."""
    kinds = torch.isnan(tensor).to(torch.int8)
    return kinds + 2 * (tensor == torch.inf).to(torch.int8) + 3 * (tensor == -torch.inf)


def _limit_rms(noise: float, floor: float, count: int) -> float:
    few = 1 / math.sqrt(max(1, count))
    return (_RMS + _SCALAR_RMS * few) * noise + floor * (1 + _SCALAR_RMS * few)


def _last_place(target: Tensor, dtype: torch.dtype) -> Tensor:
    eps = epsilon(dtype)
    return (target.abs() * eps).clamp(min=torch.finfo(dtype).smallest_normal * eps)


def _sizes_of(target: Tensor) -> Tensor:
    """The exponent of each element as an index below `_NUM_SIZES`; flattened."""
    _, exponent = torch.frexp(target.flatten())
    known = torch.where(target.flatten() == 0, -_NUM_SIZES // 2, exponent.long())
    return known.clamp_(-_NUM_SIZES // 2, _NUM_SIZES // 2 - 1).add_(_NUM_SIZES // 2)


def _pool(error: Tensor, sizes: Tensor) -> Tensor:
    """For each element, the typical error of the elements of similar magnitude.

    Square roots are averaged, so that a single large error does not dominate.
    """
    sums = torch.zeros(_NUM_SIZES, dtype=torch.float64, device=error.device)
    counts = torch.zeros_like(sums)
    sums.index_add_(0, sizes, error.flatten().sqrt())
    counts.index_add_(0, sizes, torch.ones_like(error.flatten()))
    typical = _add_neighbours(sums) / _add_neighbours(counts).clamp(min=1)
    return typical.square()[sizes].view(error.shape)


def _add_neighbours(row: Tensor) -> Tensor:
    # A convolution would do the same, but takes a hundred times as long.
    wide = torch.nn.functional.pad(row, (1, 1))
    return wide[:-2] + wide[1:-1] + wide[2:]


def _find_jumps(moved: Tensor, each: Tensor, sizes: Tensor) -> tuple[int, float]:
    """How many elements a further run would change by far, and by how much.

    Estimated from the elements that only a single run changed by far.
    """
    num_runs = len(moved)
    if num_runs < 3:
        return 0, 0.0
    first, second = moved.topk(2, dim=0).values
    is_alone = first > each + _SPREAD * second + _POOLED * _pool(second, sizes)
    num_alone = int(is_alone.sum())
    if not num_alone:
        return 0, 0.0
    return int(_SPREAD * num_alone / num_runs), _OWN * float(first[is_alone].max())


_HUGE = 1e300  # instead of infinity, which JSON cannot hold


def find_ulps(value: Tensor, wanted: Tensor, dtype: torch.dtype) -> float:
    """The largest distance, in units in the last place of `wanted`."""
    if not value.numel():
        return 0.0
    tiny = torch.finfo(dtype).smallest_normal
    _, exponent = torch.frexp(wanted.abs().clamp(min=tiny))
    unit = torch.ldexp(torch.full_like(wanted, epsilon(dtype)), exponent - 1)
    return min(_HUGE, float(((value - wanted).abs() / unit).max()))


def relative_error(error: float, scale: float) -> float:
    """The error divided by the scale; the error itself if the scale is zero."""
    related = error / scale if scale > 0 else error
    return min(_HUGE, related) if not math.isnan(related) else _HUGE


def unravel(flat_index: int, tensor: Tensor) -> tuple[int, ...]:
    """The index of an element of `tensor`, from its index in the flattened float64 tensor."""
    if tensor.is_complex():
        flat_index //= 2  # real and imaginary parts alternate
    if not tensor.numel():
        return ()
    return tuple(
        int(coordinate)
        for coordinate in torch.unravel_index(torch.tensor(flat_index), tensor.shape)
    )


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the real part of a complex dtype; other dtypes unchanged."""
    return torch.empty(0, dtype=dtype).real.dtype if dtype.is_complex else dtype


def format_attribute(value: Any) -> str:
    """A shape, dtype or device as text."""
    return str(list(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")


def format_number(value: float) -> str:
    """A number as text, also if it is NaN or infinite."""
    return {"nan": "NaN", "inf": "infinity", "-inf": "-infinity"}.get(str(value), f"{value:.6g}")


def describe(value: Any) -> str:
    """A wrong value as text: the shape of a tensor, or the start of the repr."""
    return (
        f"a tensor {format_attribute(value.shape)}"
        if isinstance(value, Tensor)
        else f"{value!r:.80}"
    )


_FEW = 3
MANY = 8
"""Runs with other roundings, before something is called wrong."""
_NEARER = 0.75  # a compiled result is more accurate if its error is below this share of eager's
_FAR = 64.0  # units in the last place, for elements that are NaN or infinite in eager execution


@final
@dataclass(frozen=True, eq=False)
class _Numbers:
    """The tensors of a case in float64, and masks of the elements to compare."""

    compiled: Tensor
    eager: Tensor
    target: Tensor  # the result in double precision, or eager's where there is none
    is_new: Tensor | None  # elements that are finite in the compiled result and not in eager's
    is_compared: Tensor | None  # finite elements; all elements if None
    dtype: torch.dtype

    @property
    def off(self) -> Tensor:
        """The absolute error of each element of the compiled result."""
        return self.clean((self.compiled - self.target).abs())

    def clean(self, tensor: Tensor) -> Tensor:
        """The tensor with zeros where elements are not compared."""
        return tensor if self.is_compared is None else torch.where(self.is_compared, tensor, 0.0)


def compare_numbers(case: Case, dtype: torch.dtype | None = None) -> Verdict:
    """The verdict on a floating-point tensor.

    `dtype` is the dtype in which the values were computed, if it is lower than the tensor's
    own.
    """
    compiled, eager = to_fp64_on_cpu(case.compiled), to_fp64_on_cpu(case.eager)
    fp64 = eager if case.fp64 is None else to_fp64_on_cpu(case.fp64)
    dtype = dtype or case.eager.dtype
    if all(map(is_finite, (compiled, eager, fp64))):
        return _compare_finite(case, _Numbers(compiled, eager, fp64, None, None, dtype))
    is_unexplained = _find_unexplained_nonfinite(case, compiled, eager, fp64)
    if bool(is_unexplained.any()):
        return _report_nonfinite(case, compiled, eager, fp64, is_unexplained)
    target = torch.where(torch.isfinite(fp64), fp64, eager)
    is_compared = torch.isfinite(compiled) & torch.isfinite(target)
    is_new = is_compared & ~torch.isfinite(eager)
    finite = _Numbers(compiled, eager, target, is_new, is_compared, dtype)
    eager = torch.where(torch.isfinite(eager), eager, target)
    clean = replace(finite, eager=finite.clean(eager), target=finite.clean(target))
    return _compare_finite(case, clean)


def _find_unexplained_nonfinite(
    case: Case, compiled: Tensor, eager: Tensor, fp64: Tensor
) -> Tensor:
    """A mask of elements that are NaN or infinite (or finite) unlike in every other run."""
    kinds = classify_nonfinite(compiled)
    is_unexplained = kinds != classify_nonfinite(eager)
    if case.fp64 is not None:
        is_unexplained &= kinds != classify_nonfinite(fp64)
        # Values that overflow when double precision is rounded to the dtype of the result.
        is_unexplained &= kinds != classify_nonfinite(
            fp64.to(real_dtype(case.eager.dtype)).double()
        )
    if bool(is_unexplained.any()):
        for sample in case.run_perturbed(MANY):
            is_unexplained &= kinds != classify_nonfinite(to_fp64_on_cpu(sample))
    return is_unexplained


def _report_nonfinite(
    case: Case, compiled: Tensor, eager: Tensor, fp64: Tensor, is_unexplained: Tensor
) -> Verdict:
    flat_index = int(is_unexplained.flatten().to(torch.int8).argmax())
    got, wanted = (float(tensor.flatten()[flat_index]) for tensor in (compiled, fp64))
    if (
        classify_nonfinite(compiled).flatten()[flat_index]
        == classify_nonfinite(fp64).flatten()[flat_index]
    ):
        wanted = float(eager.flatten()[flat_index])
    index = unravel(flat_index, case.eager)
    count = int(is_unexplained.sum())
    fact = (
        f"{case.name} has {format_number(got)} instead of {format_number(wanted)} at "
        f"{list(index)}" + (f", and {count - 1:,} more like it" if count > 1 else "")
    )
    both = torch.isfinite(compiled) & torch.isfinite(fp64) & torch.isfinite(eager)
    known = [torch.where(both, tensor, 0.0) for tensor in (compiled, eager, fp64)]
    deviation = Deviation(
        tensor=case.name,
        relative_rmse=relative_error(find_rms(known[0] - known[2]), find_rms(known[2])),
        eager_rmse=relative_error(find_rms(known[1] - known[2]), find_rms(known[2])),
        max_ulp=find_ulps(known[0], known[1], case.eager.dtype),
        worst_index=index,
        expected=wanted if math.isfinite(wanted) else None,
        got=got if math.isfinite(got) else None,
    )
    return Verdict(case.name, Condition.NAN, fact, deviation)


def _compare_finite(case: Case, numbers: _Numbers) -> Verdict:
    off = numbers.off
    failing = off
    for count in (0, _FEW, MANY):
        bounds = _find_bounds(case, numbers, count)
        if bounds is None:
            break
        failing = bounds.find_failures(off)
        if not bool(failing.any()):
            return _report_agreement(case, numbers, off)
        if bounds.is_conclusive(off, failing) or (count and not bounds.is_sample_limited(failing)):
            break
    is_number_lost = numbers.is_new is not None and bool((failing & numbers.is_new).any())
    return _report_deviation(case, numbers, off, failing, is_number_lost)


def _find_bounds(case: Case, numbers: _Numbers, count: int) -> Bounds | None:
    """The bounds from `count` perturbed runs; None if there are no such runs."""
    samples = case.run_perturbed(count) if count else []
    if count and not samples:
        return None
    fp64_samples = [to_fp64_on_cpu(sample) for sample in samples]
    finite_samples = [
        numbers.clean(torch.where(sample.isfinite(), sample, numbers.eager))
        for sample in fp64_samples
    ]
    bounds = find_bounds(numbers.eager, numbers.target, finite_samples, numbers.dtype)
    if numbers.is_new is None:
        return bounds
    far = _FAR * epsilon(numbers.dtype) * numbers.target.abs()
    return replace(bounds, each=torch.where(numbers.is_new, far, bounds.each))


def _report_agreement(case: Case, numbers: _Numbers, off: Tensor) -> Verdict:
    error, eager_error = find_rms(off), find_rms(numbers.eager - numbers.target)
    has_more = numbers.is_new is not None and bool(numbers.is_new.any())
    few = 1 + 4 / math.sqrt(max(1, off.numel()))
    # A tensor that is nothing but noise is not more accurate.
    is_nearer = error * few < _NEARER * eager_error < find_rms(numbers.target)
    if case.fp64 is None or not (has_more or is_nearer):
        return Verdict(case.name, Condition.FINE)
    deviation = _deviate(case, numbers, off)
    fact = (
        f"{case.name} has numbers where eager execution has NaN"
        if has_more
        else f"{case.name} is off by {deviation.relative_rmse:.1e} of its size, "
        f"eager execution by {deviation.eager_rmse:.1e}"
    )
    return Verdict(case.name, Condition.MORE_ACCURATE, fact, deviation)


def _report_deviation(
    case: Case, numbers: _Numbers, off: Tensor, failing: Tensor, is_number_lost: bool
) -> Verdict:
    deviation = _deviate(case, numbers, torch.where(failing, off, 0.0))
    assert deviation.got is not None
    assert deviation.expected is not None
    count = int(failing.sum())
    where = f" in {count:,} of {off.numel():,} elements" if count < off.numel() else ""
    worst = f"worst at {list(deviation.worst_index)}: " if deviation.worst_index else ""
    error = relative_error(find_rms(off), find_rms(numbers.target))
    fact = (
        f"{case.name} is off by {error:.1e} of its size (eager: {deviation.eager_rmse:.1e})"
        f"{where}, {worst}{deviation.got:.6g} instead of {deviation.expected:.6g}"
    )
    condition = Condition.NAN if is_number_lost else Condition.WRONG_RESULT
    return Verdict(case.name, condition, fact, structs.replace(deviation, relative_rmse=error))


def _deviate(case: Case, numbers: _Numbers, off: Tensor) -> Deviation:
    scale = find_rms(numbers.target)
    flat_index = int(off.argmax()) if off.numel() else 0
    return Deviation(
        tensor=case.name,
        relative_rmse=relative_error(find_rms(off), scale),
        eager_rmse=relative_error(find_rms(numbers.eager - numbers.target), scale),
        max_ulp=find_ulps(numbers.clean(numbers.compiled), numbers.eager, numbers.dtype),
        worst_index=unravel(flat_index, case.eager),
        expected=float(numbers.target.flatten()[flat_index]),
        got=float(numbers.compiled.flatten()[flat_index]),
    )
