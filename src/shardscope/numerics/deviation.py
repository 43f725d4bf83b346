"""How far off a tensor is, in the words and units of a report."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shardscope.numerics.noise import epsilon

__all__ = [
    "describe",
    "find_ulps",
    "real_dtype",
    "relate",
    "spell",
    "spell_number",
    "unravel",
]

_HUGE = 1e300  # what JSON can hold, where a ratio is none


def find_ulps(value: Tensor, wanted: Tensor, dtype: torch.dtype) -> float:
    """The largest distance, in units of the last place of what is wanted."""
    if not value.numel():
        return 0.0
    tiny = torch.finfo(dtype).smallest_normal
    _, exponent = torch.frexp(wanted.abs().clamp(min=tiny))
    unit = torch.ldexp(torch.full_like(wanted, epsilon(dtype)), exponent - 1)
    return min(_HUGE, float(((value - wanted).abs() / unit).max()))


def relate(error: float, scale: float) -> float:
    """An error relative to the numbers; to one where those are zero."""
    related = error / scale if scale > 0 else error
    return min(_HUGE, related) if not math.isnan(related) else _HUGE


def unravel(place: int, tensor: Tensor) -> tuple[int, ...]:
    """The index of an element from its place in the flattened exact tensor."""
    if tensor.is_complex():
        place //= 2  # its parts lie beside each other
    if not tensor.numel():
        return ()
    return tuple(int(one) for one in torch.unravel_index(torch.tensor(place), tensor.shape))


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the parts of complex numbers, and any other as it is."""
    return torch.empty(0, dtype=dtype).real.dtype if dtype.is_complex else dtype


def spell(value: Any) -> str:
    """A shape, dtype or device."""
    return str(list(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")


def spell_number(value: float) -> str:
    """A number, or what stands in its place."""
    return {"nan": "NaN", "inf": "infinity", "-inf": "-infinity"}.get(str(value), f"{value:.6g}")


def describe(value: Any) -> str:
    """A value that is not what it should be."""
    return f"a tensor {spell(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
