"""Takes ops of `torch.library.custom_op` apart into functions, and registers them again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from shardscope._torch.private import find_class, find_name

OPDEFS = find_name("torch._library.custom_ops.OPDEFS", "send a custom op to another process")
CustomOpDef = find_class(
    "torch._library.custom_ops.CustomOpDef", "send a custom op to another process"
)

Function = Callable[..., Any]


@final
@dataclass(frozen=True)
class CustomOp:
    """The functions and settings that a custom op was defined with."""

    name: str
    schema: str
    mutated: tuple[str, ...]
    tags: tuple[torch.Tag, ...]
    function: Function
    kernels: Mapping[str | None, Function]  # by device type; None stands for all
    fake: Function | None
    backward: Function | None
    setup_context: Function | None


def is_custom_op(value: object) -> bool:
    """Whether `value` is an op definition that `custom_op` returned."""
    return isinstance(value, CustomOpDef)


def describe_custom_op(op: Any) -> CustomOp | None:
    """The parts of a custom op, given its definition or name; None for other ops."""
    op = OPDEFS.get(op) if isinstance(op, str) else op
    if op is None:
        return None
    arguments = op._opoverload._schema.arguments
    written = (arg.name for arg in arguments if arg.alias_info and arg.alias_info.is_write)
    return CustomOp(
        name=op._qualname,
        schema=op._schema,
        mutated=tuple(written),
        tags=tuple(tag for tag in op._opoverload.tags if tag != torch.Tag.pt2_compliant_tag),
        function=op._init_fn,
        kernels={device: _user_function(kernel, op) for device, kernel in op._backend_fns.items()},
        fake=op._abstract_fn,
        backward=op._backward_fn,
        setup_context=op._setup_context_fn,
    )


def register_custom_op(op: CustomOp) -> Any:
    """Define the op, or return the existing definition with its name."""
    existing = OPDEFS.get(op.name)
    if existing is not None:
        return existing
    devices = [device for device in op.kernels if device is not None]
    definition = torch.library.custom_op(
        op.name,
        op.function,
        mutates_args=op.mutated,
        device_types=None if None in op.kernels else devices,
        schema=op.schema,
        tags=op.tags,
    )
    for device, kernel in op.kernels.items():
        definition.register_kernel(device, kernel)
    if op.fake is not None:
        definition.register_fake(op.fake)
    if op.backward is not None:
        definition.register_autograd(op.backward, setup_context=op.setup_context)
    _DEFINITIONS.append(definition)
    return definition


_DEFINITIONS: list[Any] = []  # torch unregisters an op when its definition is garbage-collected


def _user_function(kernel: Function, op: Any) -> Function:
    """The user's kernel, which torch wraps in a function that may choose another kernel."""
    wrapped = inspect.unwrap(kernel)
    cells: dict[str, Any] = dict(
        zip(wrapped.__code__.co_freevars, wrapped.__closure__ or (), strict=True)
    )
    function: Function = cells["fn"].cell_contents if "fn" in cells else op._init_fn
    return function
