"""Is a tensor of rounded numbers right? Where NaN and infinities are, then the numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from msgspec import structs
from torch import Tensor

from shardscope.numerics.case import Case, Verdict
from shardscope.numerics.deviation import find_ulps, real_dtype, relate, spell_number, unravel
from shardscope.numerics.elements import Bounds, find_bounds, kinds_of
from shardscope.numerics.noise import as_exact, epsilon, find_rms, is_finite
from shardscope.record import Condition, Deviation

__all__ = ["MANY", "compare_numbers"]

_FEW = 3
MANY = 8
"""Runs with other roundings, before something is called wrong."""
_NEARER = 0.75  # a compiled result is more accurate if its error is so much of eager's
_FAR = 64.0  # last places that a number may be off by which eager execution did not have


@final
@dataclass(frozen=True, eq=False)
class _Numbers:
    """A case in double precision: what is compared, and where."""

    compiled: Tensor
    eager: Tensor
    target: Tensor  # the exact result, or eager's where there is none
    is_new: Tensor | None  # where eager execution has no number, and compiled rightly has
    is_compared: Tensor | None  # where there are numbers; everywhere, if None
    dtype: torch.dtype

    @property
    def off(self) -> Tensor:
        """How far the compiled result is off."""
        return self.clean((self.compiled - self.target).abs())

    def clean(self, tensor: Tensor) -> Tensor:
        """Zeros where there is nothing to compare."""
        return tensor if self.is_compared is None else torch.where(self.is_compared, tensor, 0.0)


def compare_numbers(case: Case, dtype: torch.dtype | None = None) -> Verdict:
    """The verdict; `dtype` is that of the numbers, where the tensor has a longer one."""
    compiled, eager = as_exact(case.compiled), as_exact(case.eager)
    exact = eager if case.exact is None else as_exact(case.exact)
    dtype = dtype or case.eager.dtype
    if all(map(is_finite, (compiled, eager, exact))):
        return _compare_finite(case, _Numbers(compiled, eager, exact, None, None, dtype))
    stray = _find_strays(case, compiled, eager, exact)
    if bool(stray.any()):
        return _settle_stray(case, compiled, eager, exact, stray)
    target = torch.where(torch.isfinite(exact), exact, eager)
    is_compared = torch.isfinite(compiled) & torch.isfinite(target)
    is_new = is_compared & ~torch.isfinite(eager)
    bare = _Numbers(compiled, eager, target, is_new, is_compared, dtype)
    eager = torch.where(torch.isfinite(eager), eager, target)
    clean = replace(bare, eager=bare.clean(eager), target=bare.clean(target))
    return _compare_finite(case, clean)


def _find_strays(case: Case, compiled: Tensor, eager: Tensor, exact: Tensor) -> Tensor:
    """Where NaN or infinity is, or is not, and no way of computing accounts for it."""
    kinds = kinds_of(compiled)
    stray = kinds != kinds_of(eager)
    if case.exact is not None:
        stray &= kinds != kinds_of(exact)
        # Numbers in double precision that the result's dtype cannot hold.
        stray &= kinds != kinds_of(exact.to(real_dtype(case.eager.dtype)).double())
    if bool(stray.any()):
        for other in case.run_others(MANY):
            stray &= kinds != kinds_of(as_exact(other))
    return stray


def _settle_stray(
    case: Case, compiled: Tensor, eager: Tensor, exact: Tensor, stray: Tensor
) -> Verdict:
    place = int(stray.flatten().to(torch.int8).argmax())
    got, wanted = (float(one.flatten()[place]) for one in (compiled, exact))
    if kinds_of(compiled).flatten()[place] == kinds_of(exact).flatten()[place]:
        wanted = float(eager.flatten()[place])
    index = unravel(place, case.eager)
    count = int(stray.sum())
    fact = (
        f"{case.name} has {spell_number(got)} instead of {spell_number(wanted)} at "
        f"{list(index)}" + (f", and {count - 1:,} more like it" if count > 1 else "")
    )
    both = torch.isfinite(compiled) & torch.isfinite(exact) & torch.isfinite(eager)
    known = [torch.where(both, one, 0.0) for one in (compiled, eager, exact)]
    deviation = Deviation(
        tensor=case.name,
        relative_rmse=relate(find_rms(known[0] - known[2]), find_rms(known[2])),
        eager_rmse=relate(find_rms(known[1] - known[2]), find_rms(known[2])),
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
            return _settle_right(case, numbers, off)
        if bounds.is_settled(off, failing) or (count and not bounds.is_hopeful(failing)):
            break
    is_number_lost = numbers.is_new is not None and bool((failing & numbers.is_new).any())
    return _settle_off(case, numbers, off, failing, is_number_lost)


def _find_bounds(case: Case, numbers: _Numbers, count: int) -> Bounds | None:
    """The bounds that so many other runs give; None if there are none that say more."""
    others = case.run_others(count) if count else []
    if count and not others:
        return None
    exacts = [as_exact(one) for one in others]
    alike = [numbers.clean(torch.where(one.isfinite(), one, numbers.eager)) for one in exacts]
    bounds = find_bounds(numbers.eager, numbers.target, alike, numbers.dtype)
    if numbers.is_new is None:
        return bounds
    far = _FAR * epsilon(numbers.dtype) * numbers.target.abs()
    return replace(bounds, each=torch.where(numbers.is_new, far, bounds.each))


def _settle_right(case: Case, numbers: _Numbers, off: Tensor) -> Verdict:
    error, eager_error = find_rms(off), find_rms(numbers.eager - numbers.target)
    has_more = numbers.is_new is not None and bool(numbers.is_new.any())
    few = 1 + 4 / math.sqrt(max(1, off.numel()))
    # Numbers that are all noise are not nearer to anything.
    is_nearer = error * few < _NEARER * eager_error < find_rms(numbers.target)
    if case.exact is None or not (has_more or is_nearer):
        return Verdict(case.name, Condition.FINE)
    deviation = _deviate(case, numbers, off)
    fact = (
        f"{case.name} has numbers where eager execution has NaN"
        if has_more
        else f"{case.name} is off by {deviation.relative_rmse:.1e} of its size, "
        f"eager execution by {deviation.eager_rmse:.1e}"
    )
    return Verdict(case.name, Condition.MORE_ACCURATE, fact, deviation)


def _settle_off(
    case: Case, numbers: _Numbers, off: Tensor, failing: Tensor, is_number_lost: bool
) -> Verdict:
    deviation = _deviate(case, numbers, torch.where(failing, off, 0.0))
    assert deviation.got is not None
    assert deviation.expected is not None
    count = int(failing.sum())
    where = f" in {count:,} of {off.numel():,} elements" if count < off.numel() else ""
    worst = f"worst at {list(deviation.worst_index)}: " if deviation.worst_index else ""
    error = relate(find_rms(off), find_rms(numbers.target))
    fact = (
        f"{case.name} is off by {error:.1e} of its size (eager: {deviation.eager_rmse:.1e})"
        f"{where}, {worst}{deviation.got:.6g} instead of {deviation.expected:.6g}"
    )
    condition = Condition.NAN if is_number_lost else Condition.WRONG_RESULT
    return Verdict(case.name, condition, fact, structs.replace(deviation, relative_rmse=error))


def _deviate(case: Case, numbers: _Numbers, off: Tensor) -> Deviation:
    scale = find_rms(numbers.target)
    place = int(off.argmax()) if off.numel() else 0
    return Deviation(
        tensor=case.name,
        relative_rmse=relate(find_rms(off), scale),
        eager_rmse=relate(find_rms(numbers.eager - numbers.target), scale),
        max_ulp=find_ulps(numbers.clean(numbers.compiled), numbers.eager, numbers.dtype),
        worst_index=unravel(place, case.eager),
        expected=float(numbers.target.flatten()[place]),
        got=float(numbers.compiled.flatten()[place]),
    )
