"""A program run with other roundings: what it might as well have given.

Whatever an op had to round is rounded otherwise, by chance, and what it sums is summed as if in
another order. What an op computes exactly (a maximum, a copy, a count) stays as it is, and so do
comparisons that do not hang on a last place. Several such runs tell, element by element, what a
result is worth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any, final

import torch
from torch import Tensor

from shardscope._torch.dispatch import TorchDispatchMode, is_overload, op_packet, op_schema
from shardscope.numerics.noise import epsilon, is_inexact
from shardscope.numerics.widen import (
    is_random,
    map_arguments,
    widen_argument,
    written_arguments,
)

__all__ = ["RandomRounding"]

# They write what they are given, as it is.
_MOVING = ("copy_", "fill_", "zero_", "set_", "resize_", "masked_fill_", "scatter_", "detach_")
# They round nothing, whatever they are given: finding that out each time takes longer than they do.
_EXACT = frozenset(
    [
        "_efficientzerotensor",  # which has no memory: to compute with it here would crash
        "abs",
        "cat",
        "clone",
        "embedding",
        "flip",
        "gather",
        "index_select",
        "maximum",
        "minimum",
        "neg",
        "ones_like",
        "relu",
        "stack",
        "threshold_backward",
        "zeros_like",
    ]
)
# Sums are taken in blocks: of n addends, the roundings of about the root of n add up.
_BLOCK = 4.0
_NUM_DRAWN = 1 << 18
_WHOLE = 8.0  # whole numbers this far below the last that a dtype tells apart are meant


@final
class RandomRounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rounds otherwise what each op gives; another seed, other roundings."""

    supports_higher_order_operators = True  # torch would refuse to run them

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._random = Random(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = func(*args, **kwargs)
        if not is_overload(func) or _is_exact(func) or is_random(func, args, kwargs):
            return given
        if written_arguments(func):
            return self._shake_written(func, args, kwargs, given)
        if not any(map(_is_plain, _tensors(given))) or not any(map(is_inexact, _tensors(given))):
            return given
        return self._shake(func, args, kwargs, given)

    def _shake(self, func: Any, args: Any, kwargs: dict[str, Any], given: Any) -> Any:
        growth = _find_growth(func, (args, tuple(kwargs.values())), given)
        wide_args = map_arguments(args, widen_argument)
        wide_kwargs = {name: map_arguments(one, widen_argument) for name, one in kwargs.items()}
        try:
            exact = func(*wide_args, **wide_kwargs)
            amount = growth * _accumulation(given)
            shaken = map_arguments(wide_args, lambda one: self._perturb(one, amount))
            other = func(*shaken, **wide_kwargs)
        except (RuntimeError, NotImplementedError, TypeError):  # no kernel for double precision
            exact = other = None
        is_pointwise = torch.Tag.pointwise in func.tags
        return _zip(
            given,
            exact,
            other,
            lambda *three: self._round(*three, growth=growth, is_pointwise=is_pointwise),
        )

    def _round(
        self,
        given: Any,
        exact: Any,
        other: Any,
        *,
        growth: float,
        is_pointwise: bool,
    ) -> Any:
        """`other` rounded by chance where `given` had to be rounded, and `given` elsewhere."""
        if not isinstance(given, Tensor) or not is_inexact(given) or not _is_plain(given):
            return given
        amount = max(epsilon(given.dtype) / 2, growth * _accumulation(given))
        if exact is None or exact.dtype == given.dtype or exact.shape != given.shape:
            return self._perturb(given, 2 * amount)
        is_rounded = exact != given
        if not is_pointwise:  # one that is exact by luck would not be in another order
            is_rounded = is_rounded.any() & ~_is_whole(given)
        rounded = self._change(other, amount).to(given.dtype)
        return torch.where(is_rounded, rounded, given)

    def _shake_written(self, func: Any, args: Any, kwargs: dict[str, Any], given: Any) -> Any:
        if op_packet(func).__name__ in _MOVING:
            return given
        places = written_arguments(func)
        written = [one for index, one in enumerate(args) if index in places]
        written += [one for name, one in kwargs.items() if name in places]
        for tensor in {id(one): one for one in _tensors((written, given))}.values():
            if is_inexact(tensor) and _is_plain(tensor):
                tensor.copy_(self._perturb(tensor, epsilon(tensor.dtype)))
        return given

    def _perturb(self, value: Any, amount: float) -> Any:
        """A tensor with its numbers changed by up to `amount` of them; whole ones stay."""
        if not isinstance(value, Tensor) or not is_inexact(value) or not _is_plain(value):
            return value
        return torch.where(_is_whole(value), value, self._change(value, amount))

    def _change(self, value: Tensor, amount: float) -> Tensor:
        drawn = self._draw(value.numel(), value.device).view(value.shape)
        return (value * (drawn * (2 * amount) + (1 - amount))).to(value.dtype)

    def _draw(self, count: int, device: torch.device) -> Tensor:
        """So many numbers between zero and one."""
        if count > _NUM_DRAWN:
            generator = torch.Generator(device).manual_seed(self._random.getrandbits(60))
            return torch.rand(count, generator=generator, dtype=torch.float64, device=device)
        begin = self._random.randrange(_NUM_DRAWN)
        return _draw_many(device)[begin : begin + count]


@cache
def _draw_many(device: torch.device) -> Tensor:
    """Numbers to take pieces of: drawing them for each op anew takes longer than the op."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.rand(2 * _NUM_DRAWN, generator=generator, dtype=torch.float64, device=device)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and type(tensor) in (Tensor, torch.nn.Parameter)


def _is_whole(tensor: Tensor) -> Tensor:
    """Where numbers are whole, and small enough not to be whole by chance."""
    if tensor.is_complex():
        return torch.zeros_like(tensor, dtype=torch.bool)
    limit = 1 / (_WHOLE * epsilon(tensor.dtype))
    return (tensor == tensor.round()) & (tensor.abs() <= limit)


def _accumulation(given: Any) -> float:
    """The last place of what ops compute with inside: short dtypes are summed in single."""
    finest = min(epsilon(one.dtype) for one in _tensors(given) if is_inexact(one))
    return min(finest, epsilon(torch.float32))


def _find_growth(func: Any, args: Any, given: Any) -> float:
    """How many last places an op may be off by, because of how many numbers it sums."""
    if torch.Tag.pointwise in func.tags:
        return 1.0
    inputs = [one for one in _tensors(args) if is_inexact(one)]
    largest = max((one.numel() for one in inputs), default=1)
    smallest = min((one.numel() for one in _tensors(given) if one.numel()), default=1)
    longest = max((size for one in inputs for size in one.shape), default=1)
    return max(1.0, math.sqrt(max(largest / smallest, longest)) / _BLOCK)


@cache
def _is_exact(func: Any) -> bool:
    """Whether an op only moves numbers, or gives a view of them."""
    returns = op_schema(func).returns
    is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in returns)
    return is_view or (func.namespace == "aten" and op_packet(func).__name__ in _EXACT)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _zip(given: Any, exact: Any, other: Any, change: Any) -> Any:
    """`change` of what three calls of an op returned, item by item."""
    if not isinstance(given, list | tuple):
        return change(given, exact, other)
    missing = [None] * len(given)
    rows = zip(given, exact or missing, other or missing, strict=True)
    return type(given)(_zip(*row, change) for row in rows)
