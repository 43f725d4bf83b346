"""Runs a program again in double precision, with perturbed rounding, or to see if it uses the RNG.

`fp64_mode` computes in double precision, also where the program names lower dtypes.
`RandomRounding` perturbs the result of every op within its rounding error: the results of such runs
are all equally right. `perturb_ulp_` changes weights and inputs by one unit in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from random import Random
from typing import TypeVar, final

import torch
from torch import Tensor, nn

from shardscope._torch.dispatch import (
    OpOverload,
    TorchDispatchMode,
    is_overload,
    name_arguments,
    op_packet,
    op_schema,
)
from shardscope._torch.modules import every_module, exchange_tensors
from shardscope._torch.tree import map_leaves, tensor_leaves
from shardscope.attribution.tensors import TensorSubstitution, map_tensors, tensors_in
from shardscope.numerics.noise import epsilon, is_inexact

T = TypeVar("T")
Kwargs = dict[str, object]

_WIDE = {torch.complex32: torch.complex128, torch.complex64: torch.complex128}
_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_SEED = 17
# Their dtype argument reinterprets bits; it does not convert.
_BITWISE = ("view.dtype", "_reinterpret_tensor")
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


def fp64_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 or complex128 for lower floating-point and complex dtypes; others unchanged."""
    return torch.float64 if dtype in _NARROW else _WIDE.get(dtype, dtype)


def to_fp64(tensor: Tensor) -> Tensor:
    """A tensor converted to double precision; integers unchanged."""
    dtype = fp64_dtype(tensor.dtype)
    return tensor if dtype == tensor.dtype else tensor.to(dtype)


def convert_model_to_fp64(model: nn.Module) -> None:
    """Convert the tensors of a model to double precision in place.

    Parameters stay the same objects: an attribute, a list or an optimizer that refers to one goes
    on to do so, tied tensors stay tied, and views of one storage share the new one. Only a tensor
    whose type has no data of its own, such as a DTensor, is replaced.
    """
    tensors = {
        id(tensor): tensor for module in every_module(model) for tensor in tensors_in(vars(module))
    }
    _widen_in_place([tensor for tensor in tensors.values() if _can_widen_in_place(tensor)])
    substitution = TensorSubstitution(lambda tensor: to_fp64(tensor.detach()))
    exchange_tensors(
        model,
        lambda tensor: tensor if _is_wide(tensor) else substitution.of(tensor),
    )


def _is_wide(tensor: Tensor) -> bool:
    return fp64_dtype(tensor.dtype) == tensor.dtype


def _can_widen_in_place(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and not tensor.is_inference()
    return is_plain and tensor.layout is torch.strided and not _is_wide(tensor)


def _widen_in_place(tensors: Sequence[Tensor]) -> None:
    """Give each tensor its values in double precision; tensors that share a storage go on to."""
    by_storage: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        # Tensors without elements, or on the meta device, all have the address 0.
        address = tensor.untyped_storage().data_ptr() or id(tensor)
        by_storage.setdefault((address, tensor.dtype), []).append(tensor)
    for sharing in by_storage.values():
        if len(sharing) == 1:
            sharing[0].data = to_fp64(sharing[0].data)
            continue
        flat = torch.empty(0, dtype=sharing[0].dtype, device=sharing[0].device)
        wide = to_fp64(flat.set_(sharing[0].untyped_storage()))
        for tensor in sharing:
            tensor.data = wide.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def convert_inputs_to_fp64(inputs: T) -> T:
    """The inputs with their tensors converted to double precision."""

    def change(tensor: Tensor) -> Tensor:
        return to_fp64(tensor.detach()).requires_grad_(tensor.requires_grad)

    converted: T = map_tensors(inputs, change)
    return converted


def main_dtype(model: nn.Module) -> torch.dtype:
    """The floating-point dtype that most elements of a model's parameters and buffers have."""
    counts: dict[torch.dtype, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype.is_floating_point:
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
    return max(counts, key=lambda dtype: counts[dtype], default=torch.get_default_dtype())


def perturb_ulp_(model: nn.Module, inputs: T) -> T:
    """Change parameters in place, and the returned inputs, by one unit in the last place.

    The sign is random. Zeros, and inputs that hold only integers, such as masks, are unchanged.
    """
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(_perturb_ulp(parameter, generator))

    def change(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or bool((tensor == tensor.round()).all()):
            return tensor
        return _perturb_ulp(tensor.detach(), generator).requires_grad_(tensor.requires_grad)

    changed: T = map_tensors(inputs, change)
    return changed


def perturb_ulp(values: Sequence[T]) -> list[T]:
    """The values with their tensors changed by one unit in the last place, at random."""
    generator = torch.Generator().manual_seed(_SEED)
    changed: list[T] = map_tensors(list(values), lambda tensor: _perturb_ulp(tensor, generator))
    return changed


def _perturb_ulp(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not is_inexact(tensor):
        return tensor
    signs = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int8) * 2 - 1
    change = signs.to(tensor.device, tensor.dtype) * epsilon(tensor.dtype)
    return tensor.detach() + tensor.detach() * change


@contextmanager
def fp64_mode(narrow: torch.dtype) -> Iterator[None]:
    """Compute in double precision until the context ends.

    Dtypes that the program asks for become double. Random numbers are drawn in `narrow`, or in
    the dtype asked for, so that they are the same as in the run to be compared with.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Fp64Mode(narrow, default):
            yield
    finally:
        torch.set_default_dtype(default)


@final
class _Fp64Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True  # torch would refuse to run them

    def __init__(self, narrow: torch.dtype, default: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._narrow = narrow
        self._default = default

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if not is_overload(func) or str(func).endswith(_BITWISE):
            return func(*args, **kwargs)
        if is_random(func, args, kwargs):
            return self._draw(func, args, kwargs)
        written = _written_arguments(func)
        args = tuple(
            value if index in written else map_leaves(_convert_argument_to_fp64, value)
            for index, value in enumerate(args)
        )
        kwargs = {
            name: value if name in written else map_leaves(_convert_argument_to_fp64, value)
            for name, value in kwargs.items()
        }
        return func(*args, **kwargs)

    def _draw(self, func: OpOverload, args: tuple[object, ...], kwargs: Kwargs) -> object:
        """Draw random numbers in the narrow dtype, and convert them to double precision."""
        arguments = op_schema(func).arguments
        # Ops that draw integers have a dtype of their own as the default.
        names = {argument.name for argument in arguments if argument.default_value is None}
        first = args[0] if args else None
        if _written_arguments(func) and isinstance(first, Tensor):
            drawn = torch.empty_like(first, dtype=self._shrink(first.dtype))
            first.copy_(func(drawn, *args[1:], **kwargs))
            return first
        if "dtype" in names and kwargs.get("dtype") is None:
            like = first.dtype if isinstance(first, Tensor) else None
            kwargs = {**kwargs, "dtype": self._default if like is None else self._shrink(like)}
        return map_leaves(_convert_argument_to_fp64, func(*args, **kwargs))

    def _shrink(self, dtype: torch.dtype) -> torch.dtype:
        return self._narrow if dtype is torch.float64 else dtype


def is_random(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether a call of an op draws random numbers; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    arguments = name_arguments(func, args, kwargs)
    return arguments.get("dropout_p") != 0.0 and arguments.get("train") is not False


@cache
def _written_arguments(func: OpOverload) -> frozenset[int | str]:
    """The positions and the names of the arguments that an op writes into."""
    positions_and_names: set[int | str] = set()
    for index, argument in enumerate(op_schema(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            positions_and_names |= {index, argument.name}
    return frozenset(positions_and_names)


def _convert_argument_to_fp64(value: object) -> object:
    """An argument of an op with tensors and dtypes converted to double precision."""
    if isinstance(value, Tensor):
        return to_fp64(value)
    return fp64_dtype(value) if isinstance(value, torch.dtype) else value


def _copy_argument_to_fp64(value: object) -> object:
    """The same, as a copy: an op may write into arguments without saying so in its schema.

    `batch_norm` does, into the running statistics.
    """
    if isinstance(value, Tensor) and value.dtype in (torch.float64, torch.complex128):
        return value.clone()
    return _convert_argument_to_fp64(value)


@final
class RngUseMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records whether any op draws random numbers."""

    supports_higher_order_operators = True  # torch would refuse to run them

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_drawn = False

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        kwargs = kwargs or {}
        self.has_drawn |= is_overload(func) and is_random(func, args, kwargs)
        return func(*args, **kwargs)


@final
class RandomRounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Perturbs the result of each op within its rounding error; each seed gives another sample."""

    supports_higher_order_operators = True  # torch would refuse to run them

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._random = Random(seed)

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not is_overload(func) or _is_rounding_free(func) or is_random(func, args, kwargs):
            return result
        if _written_arguments(func):
            return self._perturb_written(func, args, kwargs, result)
        tensors = tensor_leaves(result)
        if not any(map(_is_dense_local, tensors)) or not any(map(is_inexact, tensors)):
            return result
        return self._perturb_result(func, args, kwargs, result)

    def _perturb_result(
        self, func: OpOverload, args: tuple[object, ...], kwargs: Kwargs, result: object
    ) -> object:
        growth = _find_growth(func, (args, tuple(kwargs.values())), result)
        wide_args = [map_leaves(_copy_argument_to_fp64, value) for value in args]
        wide_kwargs = {
            name: map_leaves(_copy_argument_to_fp64, value) for name, value in kwargs.items()
        }
        fp64: object = None
        perturbed_fp64: object = None
        try:
            wide_result = func(*wide_args, **wide_kwargs)
            amount = growth * _accumulation(result)
            perturbed_args = [
                map_leaves(lambda leaf: self._perturb_value(leaf, amount), value)
                for value in wide_args
            ]
            fp64, perturbed_fp64 = wide_result, func(*perturbed_args, **wide_kwargs)
        except (RuntimeError, NotImplementedError, TypeError):  # no kernel for double precision
            pass
        is_pointwise = torch.Tag.pointwise in func.tags

        def round_result(result: object, fp64: object, perturbed_fp64: object) -> object:
            if not isinstance(result, Tensor) or not _is_rounded(result):
                return result
            amount = max(epsilon(result.dtype) / 2, growth * _accumulation(result))
            if not isinstance(fp64, Tensor) or not isinstance(perturbed_fp64, Tensor):
                return self._perturb(result, 2 * amount)
            return self._round(result, fp64, perturbed_fp64, amount, is_pointwise=is_pointwise)

        return _map_results(result, fp64, perturbed_fp64, round_result)

    def _round(
        self,
        result: Tensor,
        fp64: Tensor,
        perturbed_fp64: Tensor,
        amount: float,
        *,
        is_pointwise: bool,
    ) -> Tensor:
        """`perturbed_fp64`, rounded, where `result` was rounded; `result` elsewhere."""
        if fp64.dtype == result.dtype or fp64.shape != result.shape:
            return self._perturb(result, 2 * amount)
        is_rounded = fp64 != result
        if not is_pointwise:  # a sum that is exact by luck would not be so in another order
            is_rounded = is_rounded.any() & ~_is_integral(result)
        rounded = self._change(perturbed_fp64, amount).to(result.dtype)
        return torch.where(is_rounded, rounded, result)

    def _perturb_written(
        self, func: OpOverload, args: tuple[object, ...], kwargs: Kwargs, result: object
    ) -> object:
        if op_packet(func).__name__ in _COPYING:
            return result
        written_keys = _written_arguments(func)
        written = [value for index, value in enumerate(args) if index in written_keys]
        written += [value for name, value in kwargs.items() if name in written_keys]
        for tensor in {id(tensor): tensor for tensor in tensor_leaves((written, result))}.values():
            if _is_rounded(tensor):
                tensor.copy_(self._perturb(tensor, epsilon(tensor.dtype)))
        return result

    def _perturb_value(self, value: object, amount: float) -> object:
        if isinstance(value, Tensor) and _is_rounded(value):
            return self._perturb(value, amount)
        return value

    def _perturb(self, tensor: Tensor, amount: float) -> Tensor:
        """A tensor changed by up to `amount`, relative to each element; integers are unchanged."""
        return torch.where(_is_integral(tensor), tensor, self._change(tensor, amount))

    def _change(self, tensor: Tensor, amount: float) -> Tensor:
        drawn = self._draw(tensor.numel(), tensor.device).view(tensor.shape)
        return (tensor * (drawn * (2 * amount) + (1 - amount))).to(tensor.dtype)

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
    return tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter)


def _is_rounded(tensor: Tensor) -> bool:
    """Whether a tensor has rounded values that can be changed here."""
    return is_inexact(tensor) and _is_dense_local(tensor)


def _is_integral(tensor: Tensor) -> Tensor:
    """A mask of elements that are integers, and small enough not to be so by chance."""
    if tensor.is_complex():
        return torch.zeros_like(tensor, dtype=torch.bool)
    limit = 1 / (_INTEGRAL_MARGIN * epsilon(tensor.dtype))
    return (tensor == tensor.round()) & (tensor.abs() <= limit)


def _accumulation(result: object) -> float:
    """The machine epsilon in which ops accumulate: float32 for lower dtypes."""
    finest = min(epsilon(tensor.dtype) for tensor in tensor_leaves(result) if is_inexact(tensor))
    return min(finest, epsilon(torch.float32))


def _find_growth(func: OpOverload, args: object, result: object) -> float:
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
def _is_rounding_free(func: OpOverload) -> bool:
    """Whether an op only moves values, or returns a view."""
    returns = op_schema(func).returns
    is_view = any(
        returned.alias_info is not None and not returned.alias_info.is_write for returned in returns
    )
    return is_view or (func.namespace == "aten" and op_packet(func).__name__ in _ROUNDING_FREE)


def _map_results(
    result: object,
    fp64: object,
    perturbed_fp64: object,
    change: Callable[[object, object, object], object],
) -> object:
    """Apply `change` to the results of three calls of an op, item by item."""
    if not isinstance(result, list | tuple):
        return change(result, fp64, perturbed_fp64)
    missing = [None] * len(result)
    fp64_items = fp64 if isinstance(fp64, list | tuple) else missing
    perturbed_items = perturbed_fp64 if isinstance(perturbed_fp64, list | tuple) else missing
    rows = zip(result, fp64_items, perturbed_items, strict=True)
    return type(result)(_map_results(a, b, c, change) for a, b, c in rows)
