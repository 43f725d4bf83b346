"""What each element of a tensor may be off by, from what eager execution gave.

A large tensor's average hides a wrong element, and its largest number hides small ones; so each
element is held to the noise of numbers of its own size, and of its own place in other runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from shardscope.numerics.noise import epsilon, find_rms

__all__ = ["Bounds", "find_bounds", "kinds_of"]

_LAST_PLACES = 2.0  # of its own, that an element may always be off by
_OWN = 2.0  # times the error that eager execution has at the same place
_POOLED = 12.0  # times the typical error of numbers of that size
_SPREAD = 4.0  # times what other roundings change at the same place
_RMS = 2.0
_RMS_OF_ONE = 24.0  # few elements tell little of the noise they came from
_ROUNDING = 0.3  # root mean square of one rounding, in last places
_GROSS = 1e3  # times the bound: nothing that other roundings could account for
_ENOUGH = 64  # elements, to tell much from how many of them fail
_NUM_SIZES = 2400  # powers of two that double precision knows


@final
@dataclass(frozen=True, eq=False)
class Bounds:
    """What a result may be off by: each element, all in the root mean square, and how many more.

    Where the function itself jumps (a comparison of numbers that are all but equal), runs with
    other roundings jump at places of their own: so a few elements may be off by as much as those.
    """

    each: Tensor
    rms: float
    num_jumps: int = 0
    jump: float = 0.0

    def find_failures(self, off: Tensor) -> Tensor:
        """Where a result that is `off` by that much is wrong: a mask."""
        failing = off > self.each
        num_failing = int(failing.sum())
        is_jumpy = 0 < num_failing <= self.num_jumps
        if is_jumpy and float(off[failing].max()) <= self.jump:
            failing = torch.zeros_like(failing)
            off = torch.where(off > self.each, 0.0, off)
        if not bool(failing.any()) and find_rms(off) > self.rms:
            return off > self.rms  # each could be noise, all together are not
        return failing

    def is_settled(self, off: Tensor, failing: Tensor) -> bool:
        """Whether further runs could not change that it is wrong: half of it is, and by far."""
        if off.numel() < _ENOUGH:
            return False
        return 2 * int((failing & (off > _GROSS * self.each)).sum()) > off.numel()

    def is_hopeful(self, failing: Tensor) -> bool:
        """Whether many further runs could tell more than a few: of few elements, or of jumps."""
        return failing.numel() < _ENOUGH or 8 * int(failing.sum()) < failing.numel()


def find_bounds(
    eager: Tensor, target: Tensor, others: Sequence[Tensor], dtype: torch.dtype
) -> Bounds:
    """The bounds of one result, from eager execution, as it is and with other roundings.

    All are exact tensors without NaN or infinity.
    """
    error = (eager - target).abs()
    sizes = _sizes_of(target)
    unit = _last_place(target, dtype)
    each = _LAST_PLACES * unit + _OWN * error + _POOLED * _pool(error, sizes)
    noise, floor = find_rms(error), _ROUNDING * find_rms(unit)
    if not others:
        return Bounds(each, _limit_rms(noise, floor, error.numel()))
    noise = max(noise, *(find_rms(one - target) for one in others))
    limit = _limit_rms(noise, floor, error.numel())
    moved = torch.stack([(one - eager).abs() for one in others])
    spread = moved.amax(0)
    bound = each + _SPREAD * spread + _POOLED * _pool(spread, sizes)
    return Bounds(bound, limit, *_find_jumps(moved, each, sizes))


def kinds_of(tensor: Tensor) -> Tensor:
    """Which of an exact tensor's elements are finite (0), NaN (1), and infinite (2, 3)."""
    kinds = torch.isnan(tensor).to(torch.int8)
    return kinds + 2 * (tensor == torch.inf).to(torch.int8) + 3 * (tensor == -torch.inf)


def _limit_rms(noise: float, floor: float, count: int) -> float:
    few = 1 / math.sqrt(max(1, count))
    return (_RMS + _RMS_OF_ONE * few) * noise + floor * (1 + _RMS_OF_ONE * few)


def _last_place(target: Tensor, dtype: torch.dtype) -> Tensor:
    eps = epsilon(dtype)
    return (target.abs() * eps).clamp(min=torch.finfo(dtype).smallest_normal * eps)


def _sizes_of(target: Tensor) -> Tensor:
    """Of each element, the power of two that it is about; a flat tensor of whole numbers."""
    _, exponent = torch.frexp(target.flatten())
    known = torch.where(target.flatten() == 0, -_NUM_SIZES // 2, exponent.long())
    return known.clamp_(-_NUM_SIZES // 2, _NUM_SIZES // 2 - 1).add_(_NUM_SIZES // 2)


def _pool(error: Tensor, sizes: Tensor) -> Tensor:
    """The typical error of the numbers that are about as large, for each element.

    Roots are averaged, so that one large error among many does not stand for all.
    """
    sums = torch.zeros(_NUM_SIZES, dtype=torch.float64, device=error.device)
    counts = torch.zeros_like(sums)
    sums.index_add_(0, sizes, error.flatten().sqrt())
    counts.index_add_(0, sizes, torch.ones_like(error.flatten()))
    typical = _add_neighbours(sums) / _add_neighbours(counts).clamp(min=1)
    return typical.square()[sizes].view(error.shape)


def _add_neighbours(row: Tensor) -> Tensor:
    # A convolution would do the same, and take a hundred times as long.
    wide = torch.nn.functional.pad(row, (1, 1))
    return wide[:-2] + wide[1:-1] + wide[2:]


def _find_jumps(moved: Tensor, each: Tensor, sizes: Tensor) -> tuple[int, float]:
    """How many elements one more run would have far off, and by how much.

    Those that a single run has far off tell how many are yet unseen.
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
