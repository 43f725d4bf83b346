"""Stack frames of torch that show the cause of a collective, an optimizer step or compiled code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum, auto
from functools import cache
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch.distributed as dist
from torch.autograd.graph import save_on_cpu
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import style as parallel_style
from torch.nn.attention.flex_attention import create_block_mask

from shardscope._torch.module_calls import CALL_CODE
from shardscope._torch.private import find_code

COMPILED_MODULES = "torch._inductor.runtime.compile_tasks."
"""The prefix of the names of modules that Inductor generates."""


class Role(IntEnum):
    """The meaning of a frame of torch. An int, because hashing a plain Enum is slow."""

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
    SPMD_CALL = auto()
    SPMD_BACKWARD = auto()


LOCALS_BY_ROLE: dict[Role, tuple[str, ...]] = {
    Role.REDISTRIBUTE: ("current_spec", "target_spec"),
    Role.IMPLICIT: ("suggested_input_schema",),
    Role.FSDP_UNSHARD: ("self",),
    Role.FSDP_REDUCE: ("self",),
    Role.FSDP_GRADIENT: ("self",),
    Role.FSDP1_UNSHARD: ("handle",),
    Role.FSDP1_REDUCE: ("handle",),
    Role.REDUCTION: ("op",),
}
"""The local variables of a frame that describe the cause of a collective issued below it."""


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
    roles: list[tuple[CodeType | None, Role]] = [
        (CALL_CODE, Role.MODULE_CALL),
        (engine_code(), Role.ENGINE),
        (optimizer_code(), Role.OPTIMIZER),
        (recompute_code(), Role.RECOMPUTE),
        (reentrant_code(), Role.RECOMPUTE),
        *(
            (find_code(name, need, variables=LOCALS_BY_ROLE[role]), role)
            for role, name, need in _FUNCTIONS
        ),
        *((code, Role.EXPLICIT) for code in _explicit_redistributions()),
        *((code, Role.REDUCTION) for code in _reductions()),
    ]
    return {id(code): role for code, role in roles if code is not None}


def running_param_group(frame: FrameType | None) -> Any:
    """The FSDP2 group whose all-gather or reduction `frame` is part of, or None."""
    roles = find_roles()
    while frame is not None and frame.f_code is not CALL_CODE:
        if roles.get(id(frame.f_code)) in (Role.FSDP_UNSHARD, Role.FSDP_REDUCE):
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


@cache
def engine_code() -> CodeType | None:
    """The code object of the function that enters the autograd engine."""
    name = "torch.autograd.graph._engine_run_backward"
    return find_code(name, "recognise backward on the stack")


@cache
def optimizer_code() -> CodeType | None:
    """The code object of the wrapper of every optimizer's step."""
    name = "torch.optim.Optimizer.profile_hook_step"
    return find_code(name, "recognise an optimizer step on the stack", inner="wrapper")


@cache
def recompute_code() -> CodeType | None:
    """The code object by which non-reentrant checkpointing recomputes its function `fn`.

    Which function defines it differs between versions of torch.
    """
    return find_code(
        "torch.utils.checkpoint", _RECOMPUTE_NEED, inner="recompute_fn", variables=("fn",)
    )


@cache
def reentrant_code() -> CodeType | None:
    """The code object by which reentrant checkpointing recomputes, and then runs backward."""
    name = "torch.utils.checkpoint.CheckpointFunction.backward"
    return find_code(name, _RECOMPUTE_NEED, variables=("ctx",))


_RECOMPUTE_NEED = "distinguish recomputation from backward"


def _explicit_redistributions() -> Iterator[CodeType]:
    """Code objects of functions by which a program explicitly requests a redistribution."""
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
    """Code objects of functions of torch.distributed with a reduction argument `op`."""
    functions = (vars(dist)[name] for name in dir(dist) if name.islower())
    # By type(): isinstance() would trigger the deprecation warning of `reduce_op`.
    for function in functions:
        if type(function) is FunctionType:
            code = inspect.unwrap(function).__code__
            if "op" in code.co_varnames[: code.co_argcount]:
                yield code


_COMPILED = find_code(
    "torch._dynamo.eval_frame._TorchDynamoContext.__call__",
    "recognise compiled code on the stack",
    inner="compile_wrapper",
)


def is_optimizer_running(frame: FrameType | None) -> bool:
    """Whether `frame` is inside an optimizer step; hooks would miss the end of one that raised."""
    return _is_around(frame, optimizer_code())


def is_compiled_running(frame: FrameType | None) -> bool:
    """Whether `frame` is inside a call of a compiled function, even if it runs eagerly."""
    return _is_around(frame, _COMPILED)


def is_compiled_mask_running(frame: FrameType | None) -> bool:
    """Whether `frame` is inside a compiled `create_block_mask`, even if it runs eagerly.

    Eager, it computes the mask of every query and key; compiled, it keeps that of blocks only.
    """
    while frame is not None:
        if frame.f_code is create_block_mask.__code__:
            return is_compiled_running(frame)
        frame = frame.f_back
    return False


@contextmanager
def watched_offloading(notify: Callable[[], None]) -> Iterator[None]:
    """Call `notify` whenever `save_on_cpu` is entered, which offloads activations to the host."""
    enter = save_on_cpu.__enter__

    def enter_and_notify(self: Any) -> Any:
        notify()
        return enter(self)

    save_on_cpu.__enter__ = enter_and_notify
    try:
        yield
    finally:
        del save_on_cpu.__enter__  # it is inherited


def _is_around(frame: FrameType | None, code: CodeType | None) -> bool:
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
