"""Compares the values of a compiled function with eager execution and with double precision.

A value is wrong if its error, relative to double precision, is larger than the error of eager
execution and of eager runs with perturbed rounding explain (`noise.Bounds`). Those runs are made
only for tensors that are not equal to eager's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import final

import torch
from msgspec import structs
from torch import Tensor

from shardscope.numerics.noise import (
    Bounds,
    classify_nonfinite,
    dense_local,
    epsilon,
    find_bounds,
    find_rms,
    is_finite,
    is_inexact,
    is_same,
    to_fp64_on_cpu,
    unravel,
)
from shardscope.record import Condition, Deviation

Values = Mapping[str, object]
"""What a run gave, by name: tensors, and whatever else a function returns."""
GetFp64Values = Callable[[], Values | None]
"""Returns the values of a run in double precision, made when first needed; None if it fails."""
PerturbedRuns = Callable[[int], Sequence[Values]]
"""Returns the values of that many eager runs with perturbed rounding, or of fewer if one fails."""

_NUM_FIRST_RUNS = 3  # with perturbed rounding; most differences are decided by these
_NUM_RUNS = 8  # with perturbed rounding, before a value is called wrong
_NEARER = 0.75  # a compiled result is more accurate if its error is below this share of eager's
_FAR = 64.0  # units in the last place, for elements that are NaN or infinite in eager execution
_HUGE = 1e300  # instead of infinity, which JSON cannot hold
# Other classes may not define equality.
_COMPARABLE = (
    *(bool, int, str, bytes, Enum, range, slice),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)


@final
@dataclass(frozen=True)
class ValueVerdict:
    """The verdict on one value: `fact` says what is wrong, or more accurate, in a sentence."""

    name: str
    condition: Condition
    fact: str = ""
    deviation: Deviation | None = None


def no_perturbed_runs(count: int) -> Sequence[Values]:
    """No runs, for callers that cannot repeat eager execution."""
    return ()


def compare(
    compiled: Values,
    eager: Values,
    get_fp64: GetFp64Values,
    perturbed_runs: PerturbedRuns = no_perturbed_runs,
) -> Iterator[ValueVerdict]:
    """A verdict on each value of either run, in eager's order."""
    for name in (*eager, *(name for name in compiled if name not in eager)):
        if name not in eager:
            yield _report_wrong(name, f"{name} exists, but not in eager execution")
        elif name not in compiled:
            yield _report_wrong(name, f"{name} is missing")
        else:
            yield compare_value(name, compiled[name], eager[name], get_fp64, perturbed_runs)


def compare_value(
    name: str,
    compiled: object,
    eager: object,
    get_fp64: GetFp64Values,
    perturbed_runs: PerturbedRuns = no_perturbed_runs,
) -> ValueVerdict:
    """The verdict on one value, which has this name in all runs."""
    if not isinstance(eager, Tensor) or not isinstance(compiled, Tensor):
        return _compare_non_tensors(name, compiled, eager, get_fp64)
    difference = _find_metadata_difference(compiled, eager)
    if difference:
        return _report_wrong(name, f"{name} {difference}")
    if eager.is_meta:
        return ValueVerdict(name, Condition.FINE)
    compiled, eager = dense_local(compiled), dense_local(eager)
    if is_same(compiled, eager):
        return ValueVerdict(name, Condition.FINE)
    known = (get_fp64() or {}).get(name)
    fp64 = dense_local(known) if isinstance(known, Tensor) else None
    if fp64 is not None and fp64.shape != eager.shape:
        fp64 = None
    case = _TensorCase(name, compiled, eager, fp64, perturbed_runs)
    return _compare_inexact(case) if is_inexact(eager) else _compare_integers(case)


def find_distance(left: object, right: object) -> float:
    """The root mean square of the difference of two values, with NaN taken for zero.

    Infinite if their types, shapes or dtypes differ. Values that are not tensors have the
    distance zero if they are of one type.
    """
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return 0.0 if type(left) is type(right) else math.inf
    if left.shape != right.shape or left.dtype != right.dtype:
        return math.inf
    if left.is_meta:
        return 0.0
    first, second = (to_fp64_on_cpu(dense_local(tensor)).nan_to_num() for tensor in (left, right))
    return find_rms(first - second)


def is_changed(after: Tensor, before: Tensor) -> bool:
    """Whether an op that may write into a tensor has changed it; tensors of any layout."""
    if after.dtype != before.dtype or after.is_meta:
        return False
    return not is_same(dense_local(after), dense_local(before))


@final
@dataclass(frozen=True, eq=False)
class _TensorCase:
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


def _compare_non_tensors(
    name: str, compiled: object, eager: object, get_fp64: GetFp64Values
) -> ValueVerdict:
    if isinstance(eager, Iterator) and isinstance(compiled, Iterator):
        return ValueVerdict(
            name, Condition.FINE
        )  # compiled code returns iterators of other classes
    if type(compiled) is not type(eager):
        return _report_wrong(name, f"{name} is {_describe(compiled)} instead of {_describe(eager)}")
    if isinstance(eager, float | complex):
        dtype = torch.complex128 if isinstance(eager, complex) else torch.float64
        got, wanted = (torch.tensor(value, dtype=dtype) for value in (compiled, eager))
        if is_same(got, wanted):
            return ValueVerdict(name, Condition.FINE)
        value = (get_fp64() or {}).get(name)
        known = torch.tensor(value, dtype=dtype) if type(value) is type(eager) else None
        # A Python number comes from a tensor, usually of lower precision.
        case = _TensorCase(name, got, wanted, known, no_perturbed_runs)
        return _compare_inexact(case, dtype=torch.float32)
    if not isinstance(eager, _COMPARABLE) or compiled == eager:
        return ValueVerdict(name, Condition.FINE)
    return _report_wrong(name, f"{name} is {_describe(compiled)} instead of {_describe(eager)}")


def _read_shape(tensor: Tensor) -> torch.Size | list[tuple[int, ...]]:
    """The shape; of a nested tensor the shapes of its components, as its own is symbolic."""
    if tensor.is_nested:
        return [tuple(component.shape) for component in tensor.unbind()]
    return tensor.shape


_METADATA: dict[str, Callable[[Tensor], object]] = {
    "layout": lambda tensor: tensor.layout,
    "shape": _read_shape,
    "dtype": lambda tensor: tensor.dtype,
    "device": lambda tensor: tensor.device,
}


def _find_metadata_difference(compiled: Tensor, eager: Tensor) -> str:
    for what, read in _METADATA.items():
        had, wanted = read(compiled), read(eager)
        if had != wanted:
            return f"has {what} {_format_attribute(had)} instead of {_format_attribute(wanted)}"
    return ""


def _format_attribute(value: object) -> str:
    """A shape, dtype or device as text."""
    return str(list(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")


def _format_number(value: float) -> str:
    """A number as text, also if it is NaN or infinite."""
    return {"nan": "NaN", "inf": "infinity", "-inf": "-infinity"}.get(str(value), f"{value:.6g}")


def _describe(value: object) -> str:
    """A wrong value as text: the shape of a tensor, or the start of the repr."""
    if isinstance(value, Tensor):
        return f"a tensor {_format_attribute(value.shape)}"
    return f"{value!r:.80}"


def _report_wrong(name: str, fact: str) -> ValueVerdict:
    return ValueVerdict(name, Condition.WRONG_RESULT, fact)


def _compare_integers(case: _TensorCase) -> ValueVerdict:
    """The verdict on integers: equal to eager's, or to a run's with perturbed rounding."""
    is_off = case.compiled != case.eager
    if case.fp64 is not None:
        is_off &= case.compiled != case.fp64
    if bool(is_off.any()):
        samples = case.run_perturbed(_NUM_RUNS)
        moved = [sample != case.eager for sample in samples]
        for sample in samples:
            is_off &= case.compiled != sample
        # Elements that only one run changed tell how many further elements may change.
        num_alone = int((torch.stack(moved).sum(0) == 1).sum()) if len(moved) > 2 else 0
        if int(is_off.sum()) > 4 * num_alone / max(1, len(samples)):
            return _report_integers(case, is_off)
    return ValueVerdict(
        case.name, Condition.FINE, f"{case.name} depends on the last bit of a number"
    )


def _report_integers(case: _TensorCase, is_off: Tensor) -> ValueVerdict:
    # Differences of large integers may vanish in double precision, so compare the integers.
    flat_index = int(is_off.flatten().to(torch.int8).argmax())
    got, wanted = (tensor.flatten()[flat_index].item() for tensor in (case.compiled, case.eager))
    count = int(is_off.sum())
    index = unravel(flat_index, case.eager)
    compiled, eager = to_fp64_on_cpu(case.compiled), to_fp64_on_cpu(case.eager)
    deviation = Deviation(
        tensor=case.name,
        relative_rmse=_relative_error(find_rms(compiled - eager), find_rms(eager)),
        eager_rmse=0.0,
        max_ulp=float(max(1, abs(int(got) - int(wanted)))),
        worst_index=index,
        expected=float(wanted),
        got=float(got),
    )
    fact = (
        f"{case.name} differs in {count:,} of {is_off.numel():,} elements, "
        f"first at {list(index)}: {got} instead of {wanted}"
    )
    return ValueVerdict(case.name, Condition.WRONG_RESULT, fact, deviation)


@final
@dataclass(frozen=True, eq=False)
class _Fp64Case:
    """The tensors of a case in float64, and masks of the elements to compare."""

    compiled: Tensor
    eager: Tensor
    target: Tensor  # the result in double precision, or eager's where there is none
    is_new: Tensor | None  # elements that are finite in the compiled result and not in eager's
    is_compared: Tensor | None  # finite elements; all elements if None
    dtype: torch.dtype  # in which the values were computed

    @property
    def off(self) -> Tensor:
        """The absolute error of each element of the compiled result."""
        return self.clean((self.compiled - self.target).abs())

    def clean(self, tensor: Tensor) -> Tensor:
        """The tensor with zeros where elements are not compared."""
        return tensor if self.is_compared is None else torch.where(self.is_compared, tensor, 0.0)


def _compare_inexact(case: _TensorCase, dtype: torch.dtype | None = None) -> ValueVerdict:
    """The verdict on a floating-point or complex tensor.

    `dtype` is the dtype in which the values were computed, if it is lower than the tensor's
    own.
    """
    compiled, eager = to_fp64_on_cpu(case.compiled), to_fp64_on_cpu(case.eager)
    fp64 = eager if case.fp64 is None else to_fp64_on_cpu(case.fp64)
    dtype = dtype or case.eager.dtype
    if all(map(is_finite, (compiled, eager, fp64))):
        return _compare_finite(case, _Fp64Case(compiled, eager, fp64, None, None, dtype))
    is_unexplained = _find_unexplained_nonfinite(case, compiled, eager, fp64)
    if bool(is_unexplained.any()):
        return _report_nonfinite(case, compiled, eager, fp64, is_unexplained)
    target = torch.where(torch.isfinite(fp64), fp64, eager)
    is_compared = torch.isfinite(compiled) & torch.isfinite(target)
    is_new = is_compared & ~torch.isfinite(eager)
    finite = _Fp64Case(compiled, eager, target, is_new, is_compared, dtype)
    eager = torch.where(torch.isfinite(eager), eager, target)
    clean = replace(finite, eager=finite.clean(eager), target=finite.clean(target))
    return _compare_finite(case, clean)


def _find_unexplained_nonfinite(
    case: _TensorCase, compiled: Tensor, eager: Tensor, fp64: Tensor
) -> Tensor:
    """A mask of elements that are NaN or infinite (or finite) unlike in every other run."""
    kinds = classify_nonfinite(compiled)
    is_unexplained = kinds != classify_nonfinite(eager)
    if case.fp64 is not None:
        is_unexplained &= kinds != classify_nonfinite(fp64)
        # Values that overflow when double precision is rounded to the dtype of the result.
        is_unexplained &= kinds != classify_nonfinite(
            fp64.to(_real_dtype(case.eager.dtype)).double()
        )
    if bool(is_unexplained.any()):
        for sample in case.run_perturbed(_NUM_RUNS):
            is_unexplained &= kinds != classify_nonfinite(to_fp64_on_cpu(sample))
    return is_unexplained


def _report_nonfinite(
    case: _TensorCase, compiled: Tensor, eager: Tensor, fp64: Tensor, is_unexplained: Tensor
) -> ValueVerdict:
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
        f"{case.name} has {_format_number(got)} instead of {_format_number(wanted)} at "
        f"{list(index)}" + (f", and {count - 1:,} more like it" if count > 1 else "")
    )
    both = torch.isfinite(compiled) & torch.isfinite(fp64) & torch.isfinite(eager)
    known = [torch.where(both, tensor, 0.0) for tensor in (compiled, eager, fp64)]
    deviation = Deviation(
        tensor=case.name,
        relative_rmse=_relative_error(find_rms(known[0] - known[2]), find_rms(known[2])),
        eager_rmse=_relative_error(find_rms(known[1] - known[2]), find_rms(known[2])),
        max_ulp=_find_ulps(known[0], known[1], case.eager.dtype),
        worst_index=index,
        expected=wanted if math.isfinite(wanted) else None,
        got=got if math.isfinite(got) else None,
    )
    return ValueVerdict(case.name, Condition.NAN, fact, deviation)


def _compare_finite(case: _TensorCase, fp64_case: _Fp64Case) -> ValueVerdict:
    off = fp64_case.off
    failing = off
    for count in (0, _NUM_FIRST_RUNS, _NUM_RUNS):
        bounds = _find_bounds(case, fp64_case, count)
        if bounds is None:
            break
        failing = bounds.find_failures(off)
        if not bool(failing.any()):
            return _report_agreement(case, fp64_case, off)
        if bounds.is_conclusive(off, failing) or (count and not bounds.is_sample_limited(failing)):
            break
    is_number_lost = fp64_case.is_new is not None and bool((failing & fp64_case.is_new).any())
    return _report_deviation(case, fp64_case, off, failing, is_number_lost)


def _find_bounds(case: _TensorCase, fp64_case: _Fp64Case, count: int) -> Bounds | None:
    """The bounds from `count` perturbed runs; None if there are no such runs."""
    samples = case.run_perturbed(count) if count else []
    if count and not samples:
        return None
    fp64_samples = [to_fp64_on_cpu(sample) for sample in samples]
    finite_samples = [
        fp64_case.clean(torch.where(sample.isfinite(), sample, fp64_case.eager))
        for sample in fp64_samples
    ]
    bounds = find_bounds(fp64_case.eager, fp64_case.target, finite_samples, fp64_case.dtype)
    if fp64_case.is_new is None:
        return bounds
    far = _FAR * epsilon(fp64_case.dtype) * fp64_case.target.abs()
    return replace(bounds, each=torch.where(fp64_case.is_new, far, bounds.each))


def _report_agreement(case: _TensorCase, fp64_case: _Fp64Case, off: Tensor) -> ValueVerdict:
    error, eager_error = find_rms(off), find_rms(fp64_case.eager - fp64_case.target)
    has_more = fp64_case.is_new is not None and bool(fp64_case.is_new.any())
    few = 1 + 4 / math.sqrt(max(1, off.numel()))
    # A tensor that is nothing but noise is not more accurate.
    is_nearer = error * few < _NEARER * eager_error < find_rms(fp64_case.target)
    if case.fp64 is None or not (has_more or is_nearer):
        return ValueVerdict(case.name, Condition.FINE)
    deviation = _make_deviation(case, fp64_case, off)
    fact = (
        f"{case.name} has numbers where eager execution has NaN"
        if has_more
        else f"{case.name} is off by {deviation.relative_rmse:.1e} of its size, "
        f"eager execution by {deviation.eager_rmse:.1e}"
    )
    return ValueVerdict(case.name, Condition.MORE_ACCURATE, fact, deviation)


def _report_deviation(
    case: _TensorCase, fp64_case: _Fp64Case, off: Tensor, failing: Tensor, is_number_lost: bool
) -> ValueVerdict:
    deviation = _make_deviation(case, fp64_case, torch.where(failing, off, 0.0))
    assert deviation.got is not None
    assert deviation.expected is not None
    count = int(failing.sum())
    where = f" in {count:,} of {off.numel():,} elements" if count < off.numel() else ""
    worst = f"worst at {list(deviation.worst_index)}: " if deviation.worst_index else ""
    error = _relative_error(find_rms(off), find_rms(fp64_case.target))
    fact = (
        f"{case.name} is off by {error:.1e} of its size (eager: {deviation.eager_rmse:.1e})"
        f"{where}, {worst}{deviation.got:.6g} instead of {deviation.expected:.6g}"
    )
    condition = Condition.NAN if is_number_lost else Condition.WRONG_RESULT
    return ValueVerdict(case.name, condition, fact, structs.replace(deviation, relative_rmse=error))


def _make_deviation(case: _TensorCase, fp64_case: _Fp64Case, off: Tensor) -> Deviation:
    scale = find_rms(fp64_case.target)
    flat_index = int(off.argmax()) if off.numel() else 0
    return Deviation(
        tensor=case.name,
        relative_rmse=_relative_error(find_rms(off), scale),
        eager_rmse=_relative_error(find_rms(fp64_case.eager - fp64_case.target), scale),
        max_ulp=_find_ulps(fp64_case.clean(fp64_case.compiled), fp64_case.eager, fp64_case.dtype),
        worst_index=unravel(flat_index, case.eager),
        expected=float(fp64_case.target.flatten()[flat_index]),
        got=float(fp64_case.compiled.flatten()[flat_index]),
    )


def _find_ulps(value: Tensor, wanted: Tensor, dtype: torch.dtype) -> float:
    """The largest distance, in units in the last place of `wanted`."""
    if not value.numel():
        return 0.0
    tiny = torch.finfo(dtype).smallest_normal
    _, exponent = torch.frexp(wanted.abs().clamp(min=tiny))
    unit = torch.ldexp(torch.full_like(wanted, epsilon(dtype)), exponent - 1)
    return min(_HUGE, float(((value - wanted).abs() / unit).max()))


def _relative_error(error: float, scale: float) -> float:
    """The error divided by the scale; the error itself if the scale is zero."""
    related = error / scale if scale > 0 else error
    return min(_HUGE, related) if not math.isnan(related) else _HUGE


def _real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the real part of a complex dtype; other dtypes unchanged."""
    return torch.empty(0, dtype=dtype).real.dtype if dtype.is_complex else dtype
