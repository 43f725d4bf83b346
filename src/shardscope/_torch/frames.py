"""What a stack of Python frames says about a collective: reading it costs ordinary ops nothing.

torch's own functions hold the answers in their locals while they run: `redistribute_local_tensor`
knows both placements, FSDP's `unshard` its parameter group, the optimizer's step that it is one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import IntEnum, auto
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch.autograd.graph
import torch.distributed as dist
import torch.utils.checkpoint
from torch.distributed.fsdp import _runtime_utils as fsdp1
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor.parallel import style as parallel_style
from torch.optim import Optimizer

from shardscope._torch.module_calls import CALL_CODE

__all__ = [
    "COMPILED_MODULES",
    "WITNESSES",
    "Role",
    "find_roles",
    "nested_code",
    "running_param_group",
]


COMPILED_MODULES = "torch._inductor.runtime.compile_tasks."
"""What the names of the modules begin with that inductor writes and loads."""


class Role(IntEnum):
    """What a frame of torch's means to us. An int, because hashing a plain Enum is slow."""

    MODULE_CALL = auto()
    ENGINE = auto()
    OPTIMIZER = auto()
    RECOMPUTE = auto()
    REDISTRIBUTE = auto()
    IMPLICIT = auto()
    EXPLICIT = auto()
    FSDP_UNSHARD = auto()
    FSDP_REDUCE = auto()
    FSDP_GRADIENT = auto()
    FSDP1_UNSHARD = auto()
    FSDP1_REDUCE = auto()
    REDUCTION = auto()


WITNESSES: dict[Role, tuple[str, ...]] = {
    Role.REDISTRIBUTE: ("current_spec", "target_spec"),
    Role.IMPLICIT: ("suggested_input_schema",),
    Role.FSDP_UNSHARD: ("self",),
    Role.FSDP_REDUCE: ("self",),
    Role.FSDP_GRADIENT: ("self",),
    Role.FSDP1_UNSHARD: ("handle",),
    Role.FSDP1_REDUCE: ("handle",),
    Role.REDUCTION: ("op",),
}
"""The locals of a frame that tell the cause of a collective issued below it."""


def find_roles() -> dict[int, Role]:
    """Roles by the identity of a code object (code hashes by content, which is slow)."""
    roles = {
        CALL_CODE: Role.MODULE_CALL,
        _code(torch.autograd.graph._engine_run_backward): Role.ENGINE,
        nested_code(Optimizer.profile_hook_step, "wrapper"): Role.OPTIMIZER,
        nested_code(
            torch.utils.checkpoint._checkpoint_without_reentrant_generator, "recompute_fn"
        ): Role.RECOMPUTE,
        _code(torch.utils.checkpoint.CheckpointFunction.backward): Role.RECOMPUTE,
        _code(_redistribute.redistribute_local_tensor): Role.REDISTRIBUTE,
        _code(OpDispatcher.redistribute_local_args): Role.IMPLICIT,
        _code(FSDPParamGroup.unshard): Role.FSDP_UNSHARD,
        _code(FSDPParamGroup.post_backward): Role.FSDP_REDUCE,
        _code(FSDPParam._get_grad_inner_tensor): Role.FSDP_GRADIENT,
        _code(fsdp1._unshard): Role.FSDP1_UNSHARD,
        _code(fsdp1._reduce_grad): Role.FSDP1_REDUCE,
        _code(fsdp1._reduce_grad_no_shard): Role.FSDP1_REDUCE,
    }
    roles |= dict.fromkeys(_explicit_redistributions(), Role.EXPLICIT)
    roles |= dict.fromkeys(_reductions(), Role.REDUCTION)
    return {id(code): role for code, role in roles.items()}


def running_param_group(frame: FrameType | None) -> Any:
    """FSDP2's parameter group that gathers its parameters or reduces its gradients around `frame`.

    None if none does.
    """
    codes = (_code(FSDPParamGroup.unshard), _code(FSDPParamGroup.post_backward))
    while frame is not None and frame.f_code is not CALL_CODE:
        if frame.f_code in codes:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def _explicit_redistributions() -> list[CodeType]:
    """Functions by which a program asks for a redistribution in so many words."""
    methods: list[Any] = [DTensor.redistribute, DTensor.full_tensor, DTensor.to_local]
    for _, cls in inspect.getmembers(parallel_style, inspect.isclass):
        if cls.__module__ == parallel_style.__name__:
            methods += [member for member in vars(cls).values() if callable(member)]
            methods += [m.__func__ for m in vars(cls).values() if isinstance(m, staticmethod)]
    return [_code(method) for method in methods if hasattr(inspect.unwrap(method), "__code__")]


def _reductions() -> list[CodeType]:
    """Functions of torch.distributed that take a reduction as `op`."""
    functions = (vars(dist)[name] for name in dir(dist) if name.islower())
    # By type(), for isinstance() would set off the warning of the deprecated `reduce_op`.
    codes = [_code(f) for f in functions if type(f) is FunctionType]
    return [code for code in codes if "op" in code.co_varnames[: code.co_argcount]]


def _code(function: Callable[..., Any]) -> CodeType:
    code: CodeType = inspect.unwrap(function).__code__
    return code


def nested_code(function: Callable[..., Any], name: str) -> CodeType:
    """The code of the function called `name` that `function` defines within itself."""
    for constant in _code(function).co_consts:
        if isinstance(constant, CodeType) and constant.co_name == name:
            return constant
    raise LookupError(f"{function.__qualname__} defines no inner function {name!r}.")
