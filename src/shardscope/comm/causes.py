"""The cause of a collective, and its owner where the cause determines it (FSDP)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import CodeType

from torch import nn

from shardscope._torch.frames import Role
from shardscope._torch.fsdp import (
    flat_handle_module,
    flat_handle_size,
    param_group_modules,
    param_group_size,
    param_places,
)
from shardscope._torch.mesh import describe_placements
from shardscope.attribution.call_sites import TORCH_FOLDER, Stack
from shardscope.comm.traffic import Payload
from shardscope.record import (
    Call,
    Cause,
    CollectiveKind,
    Compiled,
    FullyShard,
    Phase,
    Redistribute,
)

_FSDP = {Role.FSDP_UNSHARD: "unshard", Role.FSDP_REDUCE: "reduce"}
_FSDP1 = {Role.FSDP1_UNSHARD: "unshard", Role.FSDP1_REDUCE: "reduce"}


def drop_torch_references(stack: Stack, find: Callable[[Sequence[nn.Module]], int]) -> None:
    """Replace torch's objects in `stack.frame_locals`, which reference parameters, by plain facts.

    `find` returns the index of the module that contains all of the given modules.
    """
    for role, (first, *_) in stack.frame_locals.items():
        if role in _FSDP:
            stack.frame_locals[role] = (find(param_group_modules(first)), param_group_size(first))
        elif role is Role.FSDP_GRADIENT:
            stack.frame_locals[role] = (find([param_places(first)[0][0]]),)
        elif role in _FSDP1:
            stack.frame_locals[role] = (find([flat_handle_module(first)]), flat_handle_size(first))
        elif role is Role.IMPLICIT:
            stack.frame_locals[role] = (first.op,)


def find_cause(
    payload: Payload, stack: Stack, node: str | None, phase: Phase
) -> tuple[Cause | None, int | None]:
    """The cause, and the index of the owner if FSDP determines it.

    `node` is the name of the autograd node being executed.
    """
    kind = payload.kind
    if Role.REDISTRIBUTE in stack.frame_locals:
        # Also within FSDP, which reduces gradients over its own axes after DTensor did over others.
        (owner,) = stack.frame_locals.get(Role.FSDP_GRADIENT, (None,))
        return _redistribution(stack, node), owner
    for role, values in stack.frame_locals.items():
        action = _FSDP.get(role) or _FSDP1.get(role)
        if action is not None:
            owner, num_parameters = values
            return FullyShard(action=_action(kind, action), num_parameters=num_parameters), owner
    if stack.graph is not None:
        # Not the function's name: every GraphModule has `forward`, and Inductor's is always
        # `call`.
        return Compiled(graph="backward" if phase is Phase.BACKWARD else "forward"), None
    if stack.api is not None:
        return Call(api=_api_name(stack.api)), None
    if stack.is_bare:  # C++ in backward without a bucket: DDP reduces the bitmap of used parameters
        return Call(api="torch.nn.parallel.DistributedDataParallel"), None
    return Call(api=f"torch.ops.{payload.op}"), None


def _action(kind: CollectiveKind, action: str) -> str:
    """The action for a kind: HSDP all-reduces gradients over replicas after reduce-scatter."""
    return "all_reduce" if kind is CollectiveKind.ALL_REDUCE else action


def _redistribution(stack: Stack, node: str | None) -> Redistribute:
    before, after = stack.frame_locals[Role.REDISTRIBUTE]
    return Redistribute(
        before=describe_placements(before.placements),
        after=describe_placements(after.placements),
        asked_by=_asked_by(stack, node),
        is_implicit=Role.IMPLICIT in stack.frame_locals,
    )


def _asked_by(stack: Stack, node: str | None) -> str:
    if Role.FSDP_GRADIENT in stack.frame_locals:
        return "parameter gradient"
    if Role.IMPLICIT in stack.frame_locals:
        (op,) = stack.frame_locals[Role.IMPLICIT]
        return str(op)
    if stack.asked_by is not None:
        qualified = stack.asked_by.co_qualname
        return qualified if qualified.startswith("DTensor.") else qualified.split(".")[0]
    if node is not None:
        return node
    return "DTensor" if stack.api is None else _api_name(stack.api)


def _api_name(code: CodeType) -> str:
    """The public name of a function, such as `torch.distributed.all_reduce`."""
    if not code.co_filename.startswith(TORCH_FOLDER):  # our replacement of a torch function
        return f"torch.distributed.{code.co_qualname}"
    path = code.co_filename.removeprefix(TORCH_FOLDER).removesuffix(".py")
    module = ".".join(["torch", *path.split(os.sep)]).removesuffix(".__init__")
    return f"{module.removesuffix('.distributed_c10d')}.{code.co_qualname}"
