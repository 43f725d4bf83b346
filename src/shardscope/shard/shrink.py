"""The same call on smaller tensors, small enough to compute it for real on several ranks.

Sizes are divided by one number, so that what was the product of others mostly still is. Which sizes
an op lets be divided, nobody says: the op itself is asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from shardscope.shard.signature import Signature, TensorSpec

__all__ = ["MAX_ELEMENTS", "shrink", "total_size"]

MAX_ELEMENTS = 2**24
_DIVISORS = (512, 256, 128, 64, 32, 16, 8, 4, 2)
_THRESHOLDS = (4, 16, 64)  # times the divisor: what is smaller stays as it is


def shrink(call: Signature, *, num_ranks: int) -> Iterator[Signature]:
    """Ever larger versions of the call, the last of which is the call itself."""
    seen: set[Signature] = set()
    for divisor in _DIVISORS:
        for threshold in _THRESHOLDS:
            smaller = _divide(call, divisor, divisor * threshold, num_ranks)
            if smaller not in seen and smaller != call and _is_valid(smaller):
                yield smaller
            seen.add(smaller)
    yield call


def _divide(call: Signature, divisor: int, threshold: int, num_ranks: int) -> Signature:
    def change(size: int) -> int:
        if size < threshold or size % divisor:
            return size
        less = size // divisor
        # What ranks share evenly they must go on sharing evenly, and what not, not.
        return less if bool(less % num_ranks) == bool(size % num_ranks) else size

    return call.change_sizes(change)


def _is_valid(call: Signature) -> bool:
    args, kwargs = call.arguments(_make_meta)
    try:
        call.op(*args, **kwargs)
    except Exception:  # noqa: BLE001 - the op says no in whichever way it likes
        return False
    return True


def _make_meta(spec: TensorSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")


def total_size(call: Signature) -> int:
    """Elements of all tensors together."""
    return sum(math.prod(spec.shape) for _, spec in call.tensors())
