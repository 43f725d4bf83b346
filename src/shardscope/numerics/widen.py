"""A model in double precision, whatever dtypes are written down in it.

Also the model in its own dtype with weights changed in their last place: runs of the single device
that tell what its numbers are worth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, final

import torch
from torch import nn

from shardscope._torch.dispatch import TorchDispatchMode, is_overload, op_schema
from shardscope._torch.model_state import exchange_tensors
from shardscope.numerics.noise import epsilon
from shardscope.shard.stand_ins import StandIns, map_tensors

__all__ = [
    "is_random",
    "jitter",
    "jitter_",
    "main_dtype",
    "map_arguments",
    "name_arguments",
    "widen_argument",
    "widen_inputs",
    "widen_model",
    "widen_tensor",
    "widened",
    "written_arguments",
]

_WIDE = {torch.complex32: torch.complex128, torch.complex64: torch.complex128}
_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_SEED = 17
# They read a dtype as the meaning of bits, not as a wish.
_BITWISE = ("view.dtype", "_reinterpret_tensor")


def widen(dtype: torch.dtype) -> torch.dtype:
    """Double precision for a rounded dtype, and any other as it is."""
    return torch.float64 if dtype in _NARROW else _WIDE.get(dtype, dtype)


def widen_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in double precision."""
    return tensor if widen(tensor.dtype) == tensor.dtype else tensor.to(widen(tensor.dtype))


def widen_model(model: nn.Module) -> None:
    """Give a model tensors in double precision; tied ones stay tied."""
    exchange_tensors(model, StandIns(lambda tensor: widen_tensor(tensor.detach())).of)


def widen_inputs(inputs: Any) -> Any:
    """Inputs with tensors in double precision."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        return widen_tensor(tensor.detach()).requires_grad_(tensor.requires_grad)

    return map_tensors(inputs, change)


def main_dtype(model: nn.Module) -> torch.dtype:
    """The dtype that most of a model's numbers have."""
    counts: dict[torch.dtype, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype.is_floating_point:
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
    return max(counts, key=lambda one: counts[one], default=torch.get_default_dtype())


def jitter_(model: nn.Module, inputs: Any) -> Any:
    """Change parameters, in place, and inputs, which are returned, by one unit in the last place.

    Up or down by chance; zeros, and inputs of whole numbers, such as masks, stay as they are.
    """
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(_jitter(parameter, generator))

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or bool((tensor == tensor.round()).all()):
            return tensor
        return _jitter(tensor.detach(), generator).requires_grad_(tensor.requires_grad)

    return map_tensors(inputs, change)


def jitter(values: Sequence[Any]) -> list[Any]:
    """Tensors in a list changed by one unit in their last place, as `jitter_` changes them."""
    generator = torch.Generator().manual_seed(_SEED)
    return [_jitter(one, generator) if isinstance(one, torch.Tensor) else one for one in values]


def _jitter(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not tensor.is_floating_point() and not tensor.is_complex():
        return tensor
    signs = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int8) * 2 - 1
    change = signs.to(tensor.device, tensor.dtype) * epsilon(tensor.dtype)
    return tensor.detach() + tensor.detach() * change


@contextmanager
def widened(narrow: torch.dtype) -> Iterator[None]:
    """Compute in double precision until the context ends.

    Dtypes that the program asks for become double; numbers drawn at random are drawn in `narrow`,
    or in the dtype asked for, so that they are those of the run to be compared with.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widening(narrow, default):
            yield
    finally:
        torch.set_default_dtype(default)


@final
class _Widening(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
            one if index in written else map_arguments(one, widen_argument)
            for index, one in enumerate(args)
        )
        kwargs = {
            name: one if name in written else map_arguments(one, widen_argument)
            for name, one in kwargs.items()
        }
        return func(*args, **kwargs)

    def _draw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What is drawn, as the narrow run drew it."""
        names = {one.name for one in op_schema(func).arguments}
        if written_arguments(func) and isinstance(args[0], torch.Tensor):
            drawn = torch.empty_like(args[0], dtype=self._shrink(args[0].dtype))
            args[0].copy_(func(drawn, *args[1:], **kwargs))
            return args[0]
        if "dtype" in names and kwargs.get("dtype") is None:
            like = args[0].dtype if args and isinstance(args[0], torch.Tensor) else None
            kwargs = {**kwargs, "dtype": self._default if like is None else self._shrink(like)}
        return map_arguments(func(*args, **kwargs), widen_argument)

    def _shrink(self, dtype: torch.dtype) -> torch.dtype:
        return self._narrow if dtype is torch.float64 else dtype


def is_random(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call of an op draws numbers at random; attention does not without dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = name_arguments(func, args, kwargs)
    return given.get("dropout_p") != 0.0 and given.get("train") is not False


def name_arguments(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with what the op takes where none is given."""
    schema = op_schema(func).arguments
    given = {one.name: one.default_value for one in schema if one.has_default_value()}
    given |= {one.name: value for one, value in zip(schema, args, strict=False)}
    return given | kwargs


@cache
def written_arguments(func: Any) -> frozenset[int | str]:
    """Where and under which names an op takes tensors that it writes into."""
    found: set[int | str] = set()
    for index, one in enumerate(op_schema(func).arguments):
        if one.alias_info is not None and one.alias_info.is_write:
            found |= {index, one.name}
    return frozenset(found)


def widen_argument(value: Any) -> Any:
    """An argument of an op for double precision: tensors, and dtypes asked for."""
    if isinstance(value, torch.Tensor):
        return widen_tensor(value)
    return widen(value) if isinstance(value, torch.dtype) else value


def map_arguments(value: Any, change: Callable[[Any], Any]) -> Any:
    """Arguments of an op, or what it returns, with each changed that is no list."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(map_arguments(item, change) for item in value)
    return change(value)
