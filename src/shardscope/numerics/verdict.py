"""Compares the values of a compiled function with eager execution and with double precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from shardscope.numerics.elements import (
    MANY,
    compare_numbers,
    describe,
    format_attribute,
    relative_error,
    unravel,
)
from shardscope.numerics.noise import (
    Case,
    GetFp64Values,
    PerturbedRuns,
    Values,
    Verdict,
    dense_local,
    find_rms,
    is_inexact,
    no_perturbed_runs,
    to_fp64_on_cpu,
)
from shardscope.record import Condition, Deviation

# Other classes may not define equality.
_COMPARABLE = (
    *(bool, int, str, bytes, Enum, range, slice),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)


def compare(
    compiled: Values,
    eager: Values,
    get_fp64: GetFp64Values,
    perturbed_runs: PerturbedRuns = no_perturbed_runs,
) -> Iterator[Verdict]:
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
    compiled: Any,
    eager: Any,
    get_fp64: GetFp64Values,
    perturbed_runs: PerturbedRuns = no_perturbed_runs,
) -> Verdict:
    """The verdict on one value, which has this name in all runs."""
    if not isinstance(eager, Tensor) or not isinstance(compiled, Tensor):
        return _compare_non_tensors(name, compiled, eager, get_fp64)
    difference = _find_metadata_difference(compiled, eager)
    if difference:
        return _report_wrong(name, f"{name} {difference}")
    if eager.is_meta:
        return Verdict(name, Condition.FINE)
    compiled, eager = dense_local(compiled), dense_local(eager)
    if is_same(compiled, eager):
        return Verdict(name, Condition.FINE)
    known = (get_fp64() or {}).get(name)
    if isinstance(known, Tensor):
        known = dense_local(known)
        known = known if known.shape == eager.shape else None
    case = Case(name, compiled, eager, known, perturbed_runs)
    return compare_numbers(case) if is_inexact(eager) else _compare_integers(case)


def _compare_non_tensors(name: str, compiled: Any, eager: Any, get_fp64: GetFp64Values) -> Verdict:
    if isinstance(eager, Iterator) and isinstance(compiled, Iterator):
        return Verdict(name, Condition.FINE)  # compiled code returns iterators of other classes
    if type(compiled) is not type(eager):
        return _report_wrong(name, f"{name} is {describe(compiled)} instead of {describe(eager)}")
    if isinstance(eager, float | complex):
        dtype = torch.complex128 if isinstance(eager, complex) else torch.float64
        got, wanted = (torch.tensor(value, dtype=dtype) for value in (compiled, eager))
        if is_same(got, wanted):
            return Verdict(name, Condition.FINE)
        value = (get_fp64() or {}).get(name)
        known = torch.tensor(value, dtype=dtype) if type(value) is type(eager) else None
        # A Python number comes from a tensor, usually of lower precision.
        case = Case(name, got, wanted, known, no_perturbed_runs)
        return compare_numbers(case, dtype=torch.float32)
    if not isinstance(eager, _COMPARABLE) or compiled == eager:
        return Verdict(name, Condition.FINE)
    return _report_wrong(name, f"{name} is {describe(compiled)} instead of {describe(eager)}")


def _find_metadata_difference(compiled: Tensor, eager: Tensor) -> str:
    for what, read in _METADATA.items():
        had, wanted = read(compiled), read(eager)
        if had != wanted:
            return f"has {what} {format_attribute(had)} instead of {format_attribute(wanted)}"
    return ""


def _read_shape(tensor: Tensor) -> Any:
    """The shape; of a nested tensor the shapes of its components, as its own is symbolic."""
    return (
        [tuple(component.shape) for component in tensor.unbind()]
        if tensor.is_nested
        else tensor.shape
    )


_METADATA: dict[str, Callable[[Tensor], Any]] = {
    "layout": lambda tensor: tensor.layout,
    "shape": _read_shape,
    "dtype": lambda tensor: tensor.dtype,
    "device": lambda tensor: tensor.device,
}


def is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two dense tensors of one shape and dtype are equal; NaN equals NaN."""
    if a.dtype.itemsize > 1 and bool(torch.equal(a, b)):
        return True
    if not is_inexact(a):
        return bool(torch.equal(a, b))
    first, second = to_fp64_on_cpu(a), to_fp64_on_cpu(b)
    return bool(((first == second) | (torch.isnan(first) & torch.isnan(second))).all())


def _compare_integers(case: Case) -> Verdict:
    """The verdict on integers: equal to eager's, or to a run's with perturbed rounding."""
    is_off = case.compiled != case.eager
    if case.fp64 is not None:
        is_off &= case.compiled != case.fp64
    if bool(is_off.any()):
        samples = case.run_perturbed(MANY)
        moved = [sample != case.eager for sample in samples]
        for sample in samples:
            is_off &= case.compiled != sample
        # Elements that only one run changed tell how many further elements may change.
        num_alone = int((torch.stack(moved).sum(0) == 1).sum()) if len(moved) > 2 else 0
        if int(is_off.sum()) > 4 * num_alone / max(1, len(samples)):
            return _report_integers(case, is_off)
    return Verdict(case.name, Condition.FINE, f"{case.name} depends on the last bit of a number")


def _report_integers(case: Case, is_off: Tensor) -> Verdict:
    # Differences of large integers may vanish in double precision, so compare the integers.
    flat_index = int(is_off.flatten().to(torch.int8).argmax())
    got, wanted = (tensor.flatten()[flat_index].item() for tensor in (case.compiled, case.eager))
    count = int(is_off.sum())
    index = unravel(flat_index, case.eager)
    deviation = Deviation(
        tensor=case.name,
        relative_rmse=relative_error(
            find_rms(to_fp64_on_cpu(case.compiled) - to_fp64_on_cpu(case.eager)),
            find_rms(to_fp64_on_cpu(case.eager)),
        ),
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
    return Verdict(case.name, Condition.WRONG_RESULT, fact, deviation)


def _report_wrong(name: str, fact: str) -> Verdict:
    return Verdict(name, Condition.WRONG_RESULT, fact)
