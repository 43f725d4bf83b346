"""What a stack of Python frames says about a collective: reading it costs ordinary ops nothing.

torch's own functions hold the answers in their locals while they run: `redistribute_local_tensor`
knows both placements, FSDP's `unshard` its parameter group, the optimizer's step that it is one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from enum import IntEnum, auto
from functools import cache
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import style as parallel_style

from shardscope._torch.module_calls import CALL_CODE
from shardscope._torch.private import find_code

__all__ = [
    "COMPILED_MODULES",
    "WITNESSES",
    "Role",
    "engine_code",
    "find_roles",
    "optimizer_code",
    "recompute_code",
    "reentrant_code",
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


_FSDP1 = "torch.distributed.fsdp._runtime_utils"
_FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"

_FUNCTIONS = (
    (
        Role.REDISTRIBUTE,
        "torch.distributed.tensor._redistribute.redistribute_local_tensor",
        "read the placements of a redistribution",
    ),
    (
        Role.IMPLICIT,
        "torch.distributed.tensor._dispatch.OpDispatcher.redistribute_local_args",
        "name the op that requires an implicit redistribution",
    ),
    (Role.FSDP_UNSHARD, f"{_FSDP2}.unshard", "attribute FSDP2 all-gathers to modules"),
    (Role.FSDP_REDUCE, f"{_FSDP2}.post_backward", "attribute FSDP2 reduce-scatters to modules"),
    (
        Role.FSDP_GRADIENT,
        "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._get_grad_inner_tensor",
        "attribute gradients that tensor parallelism reduces under FSDP2",
    ),
    (Role.FSDP1_UNSHARD, f"{_FSDP1}._unshard", "attribute FSDP1 all-gathers to modules"),
    (Role.FSDP1_REDUCE, f"{_FSDP1}._reduce_grad", "attribute FSDP1 reduce-scatters to modules"),
    (
        Role.FSDP1_REDUCE,
        f"{_FSDP1}._reduce_grad_no_shard",
        "attribute FSDP1 all-reduces to modules",
    ),
)


@cache
def find_roles() -> dict[int, Role]:
    """Roles by the identity of a code object (code hashes by content, which is slow)."""
    found: list[tuple[CodeType | None, Role]] = [
        (CALL_CODE, Role.MODULE_CALL),
        (engine_code(), Role.ENGINE),
        (optimizer_code(), Role.OPTIMIZER),
        (recompute_code(), Role.RECOMPUTE),
        (reentrant_code(), Role.RECOMPUTE),
        *(
            (find_code(name, need, variables=WITNESSES[role]), role)
            for role, name, need in _FUNCTIONS
        ),
        *((code, Role.EXPLICIT) for code in _explicit_redistributions()),
        *((code, Role.REDUCTION) for code in _reductions()),
    ]
    return {id(code): role for code, role in found if code is not None}


def running_param_group(frame: FrameType | None) -> Any:
    """FSDP2's parameter group that gathers its parameters or reduces its gradients around `frame`.

    None if none does.
    """
    roles = find_roles()
    while frame is not None and frame.f_code is not CALL_CODE:
        if roles.get(id(frame.f_code)) in (Role.FSDP_UNSHARD, Role.FSDP_REDUCE):
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


@cache
def engine_code() -> CodeType | None:
    """The code by which Python enters the autograd engine."""
    name = "torch.autograd.graph._engine_run_backward"
    return find_code(name, "recognise backward on the stack")


@cache
def optimizer_code() -> CodeType | None:
    """The code that every optimizer's step is wrapped in."""
    name = "torch.optim.Optimizer.profile_hook_step"
    return find_code(name, "recognise an optimizer step on the stack", inner="wrapper")


@cache
def recompute_code() -> CodeType | None:
    """The code by which non-reentrant checkpointing runs its function `fn` again.

    Which function defines it differs between versions of torch.
    """
    return find_code(
        "torch.utils.checkpoint", _RECOMPUTE_NEED, inner="recompute_fn", variables=("fn",)
    )


@cache
def reentrant_code() -> CodeType | None:
    """The code by which reentrant checkpointing runs its function again, and then its backward."""
    name = "torch.utils.checkpoint.CheckpointFunction.backward"
    return find_code(name, _RECOMPUTE_NEED, variables=("ctx",))


_RECOMPUTE_NEED = "distinguish recomputation from backward"


def _explicit_redistributions() -> Iterator[CodeType]:
    """Functions by which a program asks for a redistribution in so many words."""
    methods: list[Any] = [DTensor.redistribute, DTensor.full_tensor, DTensor.to_local]
    for _, cls in inspect.getmembers(parallel_style, inspect.isclass):
        if cls.__module__ == parallel_style.__name__:
            methods += [member for member in vars(cls).values() if callable(member)]
            methods += [m.__func__ for m in vars(cls).values() if isinstance(m, staticmethod)]
    for method in methods:
        code = getattr(inspect.unwrap(method), "__code__", None)
        if code is not None:
            yield code


def _reductions() -> Iterator[CodeType]:
    """Functions of torch.distributed that take a reduction as `op`."""
    functions = (vars(dist)[name] for name in dir(dist) if name.islower())
    # By type(), for isinstance() would set off the warning of the deprecated `reduce_op`.
    for function in functions:
        if type(function) is FunctionType:
            code = inspect.unwrap(function).__code__
            if "op" in code.co_varnames[: code.co_argcount]:
                yield code
