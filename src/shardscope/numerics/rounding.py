"""Runs a program with perturbed rounding, to sample the results that are equally right."""

from __future__ import annotations

import math
from functools import cache
from random import Random
from typing import Any, final

import torch
from torch import Tensor

from shardscope._torch.dispatch import TorchDispatchMode, is_overload, op_packet, op_schema
from shardscope._torch.tree import map_leaves, tensor_leaves
from shardscope.numerics.fp64 import (
    convert_argument_to_fp64,
    is_random,
    written_arguments,
)
from shardscope.numerics.noise import epsilon, is_inexact

# They write their arguments without rounding.
_COPYING = ("copy_", "fill_", "zero_", "set_", "resize_", "masked_fill_", "scatter_", "detach_")
# They never round. The list is faster than comparing with double precision in each call.
_ROUNDING_FREE = frozenset(
    [
        "_efficientzerotensor",  # it has no storage: computing with it here would crash
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
# Sums are computed in blocks: of n terms, about sqrt(n) roundings accumulate.
_BLOCK = 4.0
_NUM_DRAWN = 1 << 18
_INTEGRAL_MARGIN = 8.0  # integers so far below the largest of a dtype are taken for exact


@final
class RandomRounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Perturbs the result of each op within its rounding error; each seed gives another sample."""

    supports_higher_order_operators = True  # torch would refuse to run them

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._random = Random(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not is_overload(func) or _is_rounding_free(func) or is_random(func, args, kwargs):
            return result
        if written_arguments(func):
            return self._perturb_written(func, args, kwargs, result)
        if not any(map(_is_dense_local, tensor_leaves(result))) or not any(
            map(is_inexact, tensor_leaves(result))
        ):
            return result
        return self._perturb_result(func, args, kwargs, result)

    def _perturb_result(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        growth = _find_growth(func, (args, tuple(kwargs.values())), result)
        wide_args = map_leaves(convert_argument_to_fp64, args)
        wide_kwargs = {
            name: map_leaves(convert_argument_to_fp64, value) for name, value in kwargs.items()
        }
        try:
            fp64 = func(*wide_args, **wide_kwargs)
            amount = growth * _accumulation(result)
            perturbed_args = map_leaves(lambda value: self._perturb(value, amount), wide_args)
            perturbed_fp64 = func(*perturbed_args, **wide_kwargs)
        except (RuntimeError, NotImplementedError, TypeError):  # no kernel for double precision
            fp64 = perturbed_fp64 = None
        is_pointwise = torch.Tag.pointwise in func.tags
        return _zip(
            result,
            fp64,
            perturbed_fp64,
            lambda *three: self._round(*three, growth=growth, is_pointwise=is_pointwise),
        )

    def _round(
        self,
        result: Any,
        fp64: Any,
        perturbed_fp64: Any,
        *,
        growth: float,
        is_pointwise: bool,
    ) -> Any:
        """`perturbed_fp64`, rounded, where `result` was rounded; `result` elsewhere."""
        if not isinstance(result, Tensor) or not is_inexact(result) or not _is_dense_local(result):
            return result
        amount = max(epsilon(result.dtype) / 2, growth * _accumulation(result))
        if fp64 is None or fp64.dtype == result.dtype or fp64.shape != result.shape:
            return self._perturb(result, 2 * amount)
        is_rounded = fp64 != result
        if not is_pointwise:  # a sum that is exact by luck would not be so in another order
            is_rounded = is_rounded.any() & ~_is_integral(result)
        rounded = self._change(perturbed_fp64, amount).to(result.dtype)
        return torch.where(is_rounded, rounded, result)

    def _perturb_written(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        if op_packet(func).__name__ in _COPYING:
            return result
        written_keys = written_arguments(func)
        written = [value for index, value in enumerate(args) if index in written_keys]
        written += [value for name, value in kwargs.items() if name in written_keys]
        for tensor in {id(tensor): tensor for tensor in tensor_leaves((written, result))}.values():
            if is_inexact(tensor) and _is_dense_local(tensor):
                tensor.copy_(self._perturb(tensor, epsilon(tensor.dtype)))
        return result

    def _perturb(self, value: Any, amount: float) -> Any:
        """A tensor changed by up to `amount`, relative to each element; integers are unchanged."""
        if not isinstance(value, Tensor) or not is_inexact(value) or not _is_dense_local(value):
            return value
        return torch.where(_is_integral(value), value, self._change(value, amount))

    def _change(self, value: Tensor, amount: float) -> Tensor:
        drawn = self._draw(value.numel(), value.device).view(value.shape)
        return (value * (drawn * (2 * amount) + (1 - amount))).to(value.dtype)

    def _draw(self, count: int, device: torch.device) -> Tensor:
        """A number of random values between zero and one."""
        if count > _NUM_DRAWN:
            generator = torch.Generator(device).manual_seed(self._random.getrandbits(60))
            return torch.rand(count, generator=generator, dtype=torch.float64, device=device)
        begin = self._random.randrange(_NUM_DRAWN)
        return _draw_many(device)[begin : begin + count]


@cache
def _draw_many(device: torch.device) -> Tensor:
    """Random values to take slices of: drawing them in each op takes longer than the op."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.rand(2 * _NUM_DRAWN, generator=generator, dtype=torch.float64, device=device)


def _is_dense_local(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and type(tensor) in (Tensor, torch.nn.Parameter)


def _is_integral(tensor: Tensor) -> Tensor:
    """A mask of elements that are integers, and small enough not to be so by chance."""
    if tensor.is_complex():
        return torch.zeros_like(tensor, dtype=torch.bool)
    limit = 1 / (_INTEGRAL_MARGIN * epsilon(tensor.dtype))
    return (tensor == tensor.round()) & (tensor.abs() <= limit)


def _accumulation(result: Any) -> float:
    """The machine epsilon in which ops accumulate: float32 for lower dtypes."""
    finest = min(epsilon(tensor.dtype) for tensor in tensor_leaves(result) if is_inexact(tensor))
    return min(finest, epsilon(torch.float32))


def _find_growth(func: Any, args: Any, result: Any) -> float:
    """The error of an op in units in the last place, which grows with the length of its sums."""
    if torch.Tag.pointwise in func.tags:
        return 1.0
    inputs = [tensor for tensor in tensor_leaves(args) if is_inexact(tensor)]
    largest = max((tensor.numel() for tensor in inputs), default=1)
    smallest = min(
        (tensor.numel() for tensor in tensor_leaves(result) if tensor.numel()), default=1
    )
    longest = max((size for tensor in inputs for size in tensor.shape), default=1)
    return max(1.0, math.sqrt(max(largest / smallest, longest)) / _BLOCK)


@cache
def _is_rounding_free(func: Any) -> bool:
    """Whether an op only moves values, or returns a view."""
    returns = op_schema(func).returns
    is_view = any(
        returned.alias_info is not None and not returned.alias_info.is_write for returned in returns
    )
    return is_view or (func.namespace == "aten" and op_packet(func).__name__ in _ROUNDING_FREE)


def _zip(result: Any, fp64: Any, perturbed_fp64: Any, change: Any) -> Any:
    """Apply `change` to the results of three calls of an op, item by item."""
    if not isinstance(result, list | tuple):
        return change(result, fp64, perturbed_fp64)
    missing = [None] * len(result)
    rows = zip(result, fp64 or missing, perturbed_fp64 or missing, strict=True)
    return type(result)(_zip(*row, change) for row in rows)


@final
class RngUseMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records whether any op draws random numbers."""

    supports_higher_order_operators = True  # torch would refuse to run them

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.has_drawn |= is_overload(func) and is_random(func, args, kwargs)
        return func(*args, **kwargs)
