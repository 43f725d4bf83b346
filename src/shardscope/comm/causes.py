"""Why a collective was issued, and the module it belongs to where the cause knows it."""

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
from shardscope._torch.meshes import describe_placements
from shardscope.comm.stack import TORCH_FOLDER, Stack
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

__all__ = ["find_cause", "hold_lightly"]

_FSDP = {Role.FSDP_UNSHARD: "unshard", Role.FSDP_REDUCE: "reduce"}
_FSDP1 = {Role.FSDP1_UNSHARD: "unshard", Role.FSDP1_REDUCE: "reduce"}


def hold_lightly(stack: Stack, find: Callable[[Sequence[nn.Module]], int]) -> None:
    """Keep of torch's own objects, which hold parameters and more, what will be asked of them.

    `find` gives the index of the module that has others in common.
    """
    for role, (first, *_) in stack.held.items():
        if role in _FSDP:
            stack.held[role] = (find(param_group_modules(first)), param_group_size(first))
        elif role is Role.FSDP_GRADIENT:
            stack.held[role] = (find([param_places(first)[0][0]]),)
        elif role in _FSDP1:
            stack.held[role] = (find([flat_handle_module(first)]), flat_handle_size(first))
        elif role is Role.IMPLICIT:
            stack.held[role] = (first.op,)


def find_cause(
    payload: Payload, stack: Stack, node: str | None, phase: Phase
) -> tuple[Cause | None, int | None]:
    """The cause, and the index of the module that owns the collective where FSDP says so.

    `node` is the name of the autograd node being executed.
    """
    kind = payload.kind
    if Role.REDISTRIBUTE in stack.held:
        # In FSDP too: it reduces gradients over its own axes, after DTensor did over the others.
        (owner,) = stack.held.get(Role.FSDP_GRADIENT, (None,))
        return _redistribution(stack, node), owner
    for role, held in stack.held.items():
        action = _FSDP.get(role) or _FSDP1.get(role)
        if action is not None:
            owner, num_parameters = held
            return FullyShard(action=_action(kind, action), num_parameters=num_parameters), owner
    if stack.graph is not None:
        # Not the name of its function: every GraphModule has a forward, and Inductor calls all of
        # them "call".
        return Compiled(graph="backward" if phase is Phase.BACKWARD else "forward"), None
    if stack.api is not None:
        return Call(api=_api_name(stack.api)), None
    if stack.is_bare:  # C++ in backward, and no bucket: how DDP learns which parameters were used
        return Call(api="torch.nn.parallel.DistributedDataParallel"), None
    return Call(api=f"torch.ops.{payload.op}"), None


def _action(kind: CollectiveKind, action: str) -> str:
    """Gradients are reduced over the shards, then, with replicas, all-reduced over those."""
    return "all_reduce" if kind is CollectiveKind.ALL_REDUCE else action


def _redistribution(stack: Stack, node: str | None) -> Redistribute:
    before, after = stack.held[Role.REDISTRIBUTE]
    return Redistribute(
        before=describe_placements(before.placements),
        after=describe_placements(after.placements),
        asked_by=_asked_by(stack, node),
        is_implicit=Role.IMPLICIT in stack.held,
    )


def _asked_by(stack: Stack, node: str | None) -> str:
    if Role.FSDP_GRADIENT in stack.held:
        return "parameter gradient"
    if Role.IMPLICIT in stack.held:
        (op,) = stack.held[Role.IMPLICIT]
        return str(op)
    if stack.asked_by is not None:
        qualified = stack.asked_by.co_qualname
        return qualified if qualified.startswith("DTensor.") else qualified.split(".")[0]
    if node is not None:
        return node
    return "DTensor" if stack.api is None else _api_name(stack.api)


def _api_name(code: CodeType) -> str:
    """`torch.distributed.all_reduce`, from where the function was defined."""
    if not code.co_filename.startswith(TORCH_FOLDER):  # one of ours that stands in torch's place
        return f"torch.distributed.{code.co_qualname}"
    path = code.co_filename.removeprefix(TORCH_FOLDER).removesuffix(".py")
    module = ".".join(["torch", *path.split(os.sep)]).removesuffix(".__init__")
    return f"{module.removesuffix('.distributed_c10d')}.{code.co_qualname}"
