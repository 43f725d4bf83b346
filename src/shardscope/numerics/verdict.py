"""Is what a compiled function gave right? Each value against eager and against double precision.

Shapes and dtypes first, then where NaN and infinities are, then numbers; whole numbers and truth
values must be equal. Nothing is held to a tolerance of ours: see elements.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from shardscope.numerics.case import Case, Exact, MoreRuns, Values, Verdict, no_more_runs, plain
from shardscope.numerics.deviation import describe, relate, spell, unravel
from shardscope.numerics.inexact import MANY, compare_numbers
from shardscope.numerics.noise import as_exact, find_rms, is_inexact
from shardscope.record import Condition, Deviation

__all__ = ["compare", "compare_value", "is_same"]

# Other classes need not know what equal means.
_COMPARABLE = (
    *(bool, int, str, bytes, Enum, range, slice),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)


def compare(
    compiled: Values, eager: Values, exact: Exact, others: MoreRuns = no_more_runs
) -> Iterator[Verdict]:
    """A verdict on each value that either run gave, one after the other."""
    for name in (*eager, *(name for name in compiled if name not in eager)):
        if name not in eager:
            yield _settle_wrong(name, f"{name} exists, but not in eager execution")
        elif name not in compiled:
            yield _settle_wrong(name, f"{name} is missing")
        else:
            yield compare_value(name, compiled[name], eager[name], exact, others)


def compare_value(
    name: str, compiled: Any, eager: Any, exact: Exact, others: MoreRuns = no_more_runs
) -> Verdict:
    """The verdict on one value, of that name in all runs."""
    if not isinstance(eager, Tensor) or not isinstance(compiled, Tensor):
        return _compare_plain(name, compiled, eager, exact)
    difference = _find_outward_difference(compiled, eager)
    if difference:
        return _settle_wrong(name, f"{name} {difference}")
    if eager.is_meta:
        return Verdict(name, Condition.FINE)
    compiled, eager = plain(compiled), plain(eager)
    if is_same(compiled, eager):
        return Verdict(name, Condition.FINE)
    known = (exact() or {}).get(name)
    if isinstance(known, Tensor):
        known = plain(known)
        known = known if known.shape == eager.shape else None
    case = Case(name, compiled, eager, known, others)
    return compare_numbers(case) if is_inexact(eager) else _compare_whole(case)


def _compare_plain(name: str, compiled: Any, eager: Any, exact: Exact) -> Verdict:
    if isinstance(eager, Iterator) and isinstance(compiled, Iterator):
        return Verdict(name, Condition.FINE)  # the compiler has kinds of its own
    if type(compiled) is not type(eager):
        return _settle_wrong(name, f"{name} is {describe(compiled)} instead of {describe(eager)}")
    if isinstance(eager, float | complex):
        dtype = torch.complex128 if isinstance(eager, complex) else torch.float64
        got, wanted = (torch.tensor(one, dtype=dtype) for one in (compiled, eager))
        if is_same(got, wanted):
            return Verdict(name, Condition.FINE)
        value = (exact() or {}).get(name)
        known = torch.tensor(value, dtype=dtype) if type(value) is type(eager) else None
        # A number in Python came out of a tensor that was shorter than it is.
        case = Case(name, got, wanted, known, no_more_runs)
        return compare_numbers(case, dtype=torch.float32)
    if not isinstance(eager, _COMPARABLE) or compiled == eager:
        return Verdict(name, Condition.FINE)
    return _settle_wrong(name, f"{name} is {describe(compiled)} instead of {describe(eager)}")


def _find_outward_difference(compiled: Tensor, eager: Tensor) -> str:
    for what, read in _OUTWARD.items():
        had, wanted = read(compiled), read(eager)
        if had != wanted:
            return f"has {what} {spell(had)} instead of {spell(wanted)}"
    return ""


def _read_shape(tensor: Tensor) -> Any:
    """Of a nested tensor the shapes of its parts: its own has numbers of no meaning in it."""
    return [tuple(one.shape) for one in tensor.unbind()] if tensor.is_nested else tensor.shape


_OUTWARD: dict[str, Callable[[Tensor], Any]] = {
    "layout": lambda tensor: tensor.layout,
    "shape": _read_shape,
    "dtype": lambda tensor: tensor.dtype,
    "device": lambda tensor: tensor.device,
}


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether all numbers of two plain tensors of a shape and dtype are; a NaN is another."""
    if one.dtype.itemsize > 1 and bool(torch.equal(one, other)):
        return True
    if not is_inexact(one):
        return bool(torch.equal(one, other))
    first, second = as_exact(one), as_exact(other)
    return bool(((first == second) | (torch.isnan(first) & torch.isnan(second))).all())


def _compare_whole(case: Case) -> Verdict:
    """Of numbers that are not rounded: equal, or what eager gives with other roundings there."""
    is_off = case.compiled != case.eager
    if case.exact is not None:
        is_off &= case.compiled != case.exact
    if bool(is_off.any()):
        others = case.run_others(MANY)
        moved = [one != case.eager for one in others]
        for one in others:
            is_off &= case.compiled != one
        # What a single run has chosen otherwise tells how many choices are yet unseen.
        num_alone = int((torch.stack(moved).sum(0) == 1).sum()) if len(moved) > 2 else 0
        if int(is_off.sum()) > 4 * num_alone / max(1, len(others)):
            return _settle_whole(case, is_off)
    return Verdict(case.name, Condition.FINE, f"{case.name} depends on the last bit of a number")


def _settle_whole(case: Case, is_off: Tensor) -> Verdict:
    # Differences of large whole numbers do not survive double precision; their places do.
    place = int(is_off.flatten().to(torch.int8).argmax())
    got, wanted = (one.flatten()[place].item() for one in (case.compiled, case.eager))
    count = int(is_off.sum())
    index = unravel(place, case.eager)
    deviation = Deviation(
        tensor=case.name,
        relative_rmse=relate(
            find_rms(as_exact(case.compiled) - as_exact(case.eager)),
            find_rms(as_exact(case.eager)),
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


def _settle_wrong(name: str, fact: str) -> Verdict:
    return Verdict(name, Condition.WRONG_RESULT, fact)
