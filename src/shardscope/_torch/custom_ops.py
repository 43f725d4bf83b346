"""Ops that `torch.library.custom_op` made, as plain functions, and made again from them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from shardscope._torch.private import find_class, find_name

__all__ = ["CustomOp", "describe_custom_op", "is_custom_op", "register_custom_op"]

OPDEFS = find_name("torch._library.custom_ops.OPDEFS", "send a custom op to another process")
CustomOpDef = find_class(
    "torch._library.custom_ops.CustomOpDef", "send a custom op to another process"
)

Function = Callable[..., Any]


@final
@dataclass(frozen=True)
class CustomOp:
    """All that an op was made of."""

    name: str
    schema: str
    mutated: tuple[str, ...]
    tags: tuple[torch.Tag, ...]
    function: Function
    kernels: Mapping[str | None, Function]  # by type of device; None is for all
    fake: Function | None
    backward: Function | None
    setup_context: Function | None


def is_custom_op(value: object) -> bool:
    """Whether it is what `custom_op` returns."""
    return isinstance(value, CustomOpDef)


def describe_custom_op(op: Any) -> CustomOp | None:
    """By itself or by name; None for an op that was made in another way."""
    op = OPDEFS.get(op) if isinstance(op, str) else op
    if op is None:
        return None
    arguments = op._opoverload._schema.arguments
    written = (one.name for one in arguments if one.alias_info and one.alias_info.is_write)
    return CustomOp(
        name=op._qualname,
        schema=op._schema,
        mutated=tuple(written),
        tags=tuple(one for one in op._opoverload.tags if one != torch.Tag.pt2_compliant_tag),
        function=op._init_fn,
        kernels={device: _user_function(one, op) for device, one in op._backend_fns.items()},
        fake=op._abstract_fn,
        backward=op._backward_fn,
        setup_context=op._setup_context_fn,
    )


def register_custom_op(op: CustomOp) -> Any:
    """Make it, unless there is one of that name."""
    known = OPDEFS.get(op.name)
    if known is not None:
        return known
    devices = [device for device in op.kernels if device is not None]
    made = torch.library.custom_op(
        op.name,
        op.function,
        mutates_args=op.mutated,
        device_types=None if None in op.kernels else devices,
        schema=op.schema,
        tags=op.tags,
    )
    for device, kernel in op.kernels.items():
        made.register_kernel(device, kernel)
    if op.fake is not None:
        made.register_fake(op.fake)
    if op.backward is not None:
        made.register_autograd(op.backward, setup_context=op.setup_context)
    _KEPT.append(made)
    return made


_KEPT: list[Any] = []  # torch forgets an op whose definition nobody holds


def _user_function(kernel: Function, op: Any) -> Function:
    """The kernel as it was given: torch wraps it in a function that may choose another."""
    inner = inspect.unwrap(kernel)
    held: dict[str, Any] = dict(
        zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True)
    )
    function: Function = held["fn"].cell_contents if "fn" in held else op._init_fn
    return function
