"""Stack frames of torch: code objects by role, and the local variables with a cause."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest
import torch.autograd.graph
import torch.distributed as dist
import torch.utils.checkpoint
from torch.distributed.fsdp import _runtime_utils as fsdp1
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.optim import SGD, AdamW, Optimizer

from shardscope._torch.autograd import find_recomputed
from shardscope._torch.frames import (
    LOCALS_BY_ROLE,
    Role,
    find_roles,
    optimizer_code,
    recompute_code,
)

FUNCTIONS: list[tuple[Role, Callable[..., Any]]] = [
    (Role.ENGINE, torch.autograd.graph._engine_run_backward),
    (Role.RECOMPUTE, torch.utils.checkpoint.CheckpointFunction.backward),
    (Role.REDISTRIBUTE, _redistribute.redistribute_local_tensor),
    (Role.IMPLICIT, OpDispatcher.redistribute_local_args),
    (Role.EXPLICIT, DTensor.redistribute),
    (Role.EXPLICIT, DTensor.full_tensor),
    (Role.EXPLICIT, DTensor.to_local),
    (Role.EXPLICIT, ColwiseParallel._prepare_output_fn),
    (Role.EXPLICIT, RowwiseParallel._prepare_output_fn),
    (Role.EXPLICIT, SequenceParallel._prepare_input_fn),
    (Role.FSDP_UNSHARD, FSDPParamGroup.unshard),
    (Role.FSDP_REDUCE, FSDPParamGroup.post_backward),
    (Role.FSDP_GRADIENT, FSDPParam._get_grad_inner_tensor),
    (Role.FSDP1_UNSHARD, fsdp1._unshard),
    (Role.FSDP1_REDUCE, fsdp1._reduce_grad),
    (Role.FSDP1_REDUCE, fsdp1._reduce_grad_no_shard),
    (Role.REDUCTION, dist.all_reduce),
    (Role.REDUCTION, dist.reduce),
    (Role.REDUCTION, dist.reduce_scatter_tensor),
]


def code_of(function: Callable[..., Any]) -> CodeType:
    return inspect.unwrap(function).__code__


@pytest.mark.parametrize(("role", "function"), FUNCTIONS)
def test_functions_of_torch_have_their_roles(role: Role, function: Callable[..., Any]) -> None:
    assert find_roles()[id(code_of(function))] is role


@pytest.mark.parametrize(
    ("role", "function"),
    [(role, function) for role, function in FUNCTIONS if role in LOCALS_BY_ROLE],
)
def test_functions_have_the_local_variables_with_the_cause(
    role: Role, function: Callable[..., Any]
) -> None:
    code = code_of(function)
    missing = set(LOCALS_BY_ROLE[role]) - set(code.co_varnames) - set(code.co_cellvars)
    assert missing == set(), (
        f"torch's {function.__qualname__} has no local {missing} any more; _torch/frames.py needs "
        f"it to tell the cause of a collective ({role.name})."
    )


def test_every_role_with_local_variables_is_checked() -> None:
    assert set(LOCALS_BY_ROLE) <= {role for role, _ in FUNCTIONS}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_function_is_found_while_it_is_recomputed(use_reentrant: bool) -> None:
    recomputed: list[Any] = []

    def wave(x: torch.Tensor) -> torch.Tensor:
        recomputed.append(find_recomputed(sys._getframe()))
        return x.sin()

    x = torch.ones(1, requires_grad=True)
    torch.utils.checkpoint.checkpoint(wave, x * 2, use_reentrant=use_reentrant).backward()
    assert recomputed == [None, wave], (
        "_torch/frames.py and recompute.py no longer see that torch.utils.checkpoint runs a "
        "function again."
    )


def test_the_recompute_code_has_its_role() -> None:
    assert find_roles()[id(recompute_code())] is Role.RECOMPUTE


@pytest.mark.parametrize("optimizer", [SGD, AdamW])
def test_steps_of_optimizers_run_through_the_profiling_wrapper(optimizer: type[Optimizer]) -> None:
    wrapper = optimizer_code()
    parameter = torch.nn.Parameter(torch.ones(1))
    step = optimizer([parameter], lr=0.1).step
    codes = set()
    while hasattr(step, "__wrapped__"):
        codes.add(step.__code__)
        step = step.__wrapped__
    assert wrapper in codes, (
        "torch no longer wraps optimizer steps in Optimizer.profile_hook_step; _torch/frames.py "
        "needs it to tell the optimizer phase."
    )
    assert find_roles()[id(wrapper)] is Role.OPTIMIZER
