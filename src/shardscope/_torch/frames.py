"""What a stack of Python frames says about a collective: reading it costs ordinary ops nothing.

torch's own functions hold the answers in their locals while they run: `redistribute_local_tensor`
knows both placements, FSDP's `unshard` its parameter group, the optimizer's step that it is one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import IntEnum, auto
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch.autograd.graph
import torch.distributed as dist
import torch.utils.checkpoint
from torch.distributed.fsdp import _runtime_utils as fsdp1
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor.parallel import style as parallel_style
from torch.optim import Optimizer

from shardscope._torch.module_calls import CALL_CODE

__all__ = ["COMPILED_MODULES", "WITNESSES", "Role", "find_roles", "nested_code", "recompute_code"]


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
    FSDP1_UNSHARD = auto()
    FSDP1_REDUCE = auto()
    REDUCTION = auto()


WITNESSES: dict[Role, tuple[str, ...]] = {
    Role.REDISTRIBUTE: ("current_spec", "target_spec"),
    Role.IMPLICIT: ("suggested_input_schema",),
    Role.FSDP_UNSHARD: ("self",),
    Role.FSDP_REDUCE: ("self",),
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
        recompute_code(): Role.RECOMPUTE,
        _code(torch.utils.checkpoint.CheckpointFunction.backward): Role.RECOMPUTE,
        _code(_redistribute.redistribute_local_tensor): Role.REDISTRIBUTE,
        _code(OpDispatcher.redistribute_local_args): Role.IMPLICIT,
        _code(FSDPParamGroup.unshard): Role.FSDP_UNSHARD,
        _code(FSDPParamGroup.post_backward): Role.FSDP_REDUCE,
        _code(fsdp1._unshard): Role.FSDP1_UNSHARD,
        _code(fsdp1._reduce_grad): Role.FSDP1_REDUCE,
        _code(fsdp1._reduce_grad_no_shard): Role.FSDP1_REDUCE,
    }
    roles |= dict.fromkeys(_explicit_redistributions(), Role.EXPLICIT)
    roles |= dict.fromkeys(_reductions(), Role.REDUCTION)
    return {id(code): role for code, role in roles.items()}


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
    code = _find_nested(_code(function), name)
    if code is None:
        raise LookupError(f"{function.__qualname__} defines no inner function {name!r}.")
    return code


@cache
def recompute_code() -> CodeType:
    """The code by which non-reentrant checkpointing runs its function `fn` again.

    The function that defines it is another one since torch 2.14, which keeps the old name for other
    callers: so every function of the module is asked.
    """
    for function in vars(torch.utils.checkpoint).values():
        if inspect.isfunction(function):
            code = _find_nested(_code(function), "recompute_fn")
            if code is not None:
                return code
    raise LookupError("No function of torch.utils.checkpoint defines a function 'recompute_fn'.")


def _find_nested(code: CodeType, name: str) -> CodeType | None:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return next((candidate for candidate in inner if candidate.co_name == name), None)
