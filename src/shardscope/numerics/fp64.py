"""Runs a model in double precision, also where its code names lower dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, final

import torch
from torch import nn

from shardscope._torch.dispatch import TorchDispatchMode, is_overload, op_schema
from shardscope._torch.modules import exchange_tensors
from shardscope._torch.tree import map_leaves
from shardscope.attribution.tensors import TensorSubstitution, map_tensors
from shardscope.numerics.noise import epsilon

_WIDE = {torch.complex32: torch.complex128, torch.complex64: torch.complex128}
_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_SEED = 17
# Their dtype argument reinterprets bits; it does not convert.
_BITWISE = ("view.dtype", "_reinterpret_tensor")


def fp64_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 or complex128 for lower floating-point and complex dtypes; others unchanged."""
    return torch.float64 if dtype in _NARROW else _WIDE.get(dtype, dtype)


def to_fp64(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor converted to double precision; integers unchanged."""
    return (
        tensor if fp64_dtype(tensor.dtype) == tensor.dtype else tensor.to(fp64_dtype(tensor.dtype))
    )


def convert_model_to_fp64(model: nn.Module) -> None:
    """Replace the tensors of a model by tensors in double precision; tied tensors stay tied."""
    exchange_tensors(model, TensorSubstitution(lambda tensor: to_fp64(tensor.detach())).of)


def convert_inputs_to_fp64(inputs: Any) -> Any:
    """The inputs with their tensors converted to double precision."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        return to_fp64(tensor.detach()).requires_grad_(tensor.requires_grad)

    return map_tensors(inputs, change)


def main_dtype(model: nn.Module) -> torch.dtype:
    """The floating-point dtype that most elements of a model's parameters and buffers have."""
    counts: dict[torch.dtype, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype.is_floating_point:
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
    return max(counts, key=lambda dtype: counts[dtype], default=torch.get_default_dtype())


def perturb_ulp_(model: nn.Module, inputs: Any) -> Any:
    """Change parameters in place, and the returned inputs, by one unit in the last place.

    The sign is random. Zeros, and inputs that hold only integers, such as masks, are unchanged.
    """
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(_perturb_ulp(parameter, generator))

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or bool((tensor == tensor.round()).all()):
            return tensor
        return _perturb_ulp(tensor.detach(), generator).requires_grad_(tensor.requires_grad)

    return map_tensors(inputs, change)


def perturb_ulp(values: Sequence[Any]) -> list[Any]:
    """The values with their tensors changed by one unit in the last place, at random."""
    generator = torch.Generator().manual_seed(_SEED)
    return [
        _perturb_ulp(value, generator) if isinstance(value, torch.Tensor) else value
        for value in values
    ]


def _perturb_ulp(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not tensor.is_floating_point() and not tensor.is_complex():
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_overload(func) or str(func).endswith(_BITWISE):
            return func(*args, **kwargs)
        if is_random(func, args, kwargs):
            return self._draw(func, args, kwargs)
        written = written_arguments(func)
        args = tuple(
            value if index in written else map_leaves(convert_argument_to_fp64, value)
            for index, value in enumerate(args)
        )
        kwargs = {
            name: value if name in written else map_leaves(convert_argument_to_fp64, value)
            for name, value in kwargs.items()
        }
        return func(*args, **kwargs)

    def _draw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Draw random numbers in the narrow dtype, and convert them to double precision."""
        names = {argument.name for argument in op_schema(func).arguments}
        if written_arguments(func) and isinstance(args[0], torch.Tensor):
            drawn = torch.empty_like(args[0], dtype=self._shrink(args[0].dtype))
            args[0].copy_(func(drawn, *args[1:], **kwargs))
            return args[0]
        if "dtype" in names and kwargs.get("dtype") is None:
            like = args[0].dtype if args and isinstance(args[0], torch.Tensor) else None
            kwargs = {**kwargs, "dtype": self._default if like is None else self._shrink(like)}
        return map_leaves(convert_argument_to_fp64, func(*args, **kwargs))

    def _shrink(self, dtype: torch.dtype) -> torch.dtype:
        return self._narrow if dtype is torch.float64 else dtype


def is_random(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call of an op draws random numbers; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    arguments = name_arguments(func, args, kwargs)
    return arguments.get("dropout_p") != 0.0 and arguments.get("train") is not False


def name_arguments(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with the defaults of the op's schema."""
    schema = op_schema(func).arguments
    arguments = {
        argument.name: argument.default_value for argument in schema if argument.has_default_value()
    }
    arguments |= {argument.name: value for argument, value in zip(schema, args, strict=False)}
    return arguments | kwargs


@cache
def written_arguments(func: Any) -> frozenset[int | str]:
    """The positions and the names of the arguments that an op writes into."""
    positions_and_names: set[int | str] = set()
    for index, argument in enumerate(op_schema(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            positions_and_names |= {index, argument.name}
    return frozenset(positions_and_names)


def convert_argument_to_fp64(value: Any) -> Any:
    """An argument of an op with tensors and dtypes converted to double precision."""
    if isinstance(value, torch.Tensor):
        return to_fp64(value)
    return fp64_dtype(value) if isinstance(value, torch.dtype) else value
