"""FSDP groups: parameters that FSDP1 or FSDP2 gathers and reduces together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from shardscope._torch.fsdp import flat_handle_module, param_groups_within, param_places
from shardscope._torch.mesh import axis_names
from shardscope._torch.modules import every_module, parameter_named
from shardscope._torch.private import find_class
from shardscope.record import MarkKind

FlatParameter = find_class(
    "torch.distributed.fsdp._flat_param.FlatParameter",
    "recognise the flat parameters of FSDP1",
)
FLAT_PARAMETER = "_flat_param"
"""The name of FSDP1's flat parameter, if it hides the original parameters."""

ParamSlot = tuple[nn.Module, str]  # a module and the name of its parameter


@dataclass(frozen=True, kw_only=True)
class ManagedGroup:
    """An FSDP group, with the modules and names of its parameters.

    `modules` are those that FSDP was applied to, several if in one call. `places` has the module
    and name of each parameter, `ties` the further ones of tied parameters.
    """

    kind: MarkKind
    modules: tuple[nn.Module, ...]
    places: tuple[ParamSlot, ...]
    ties: tuple[ParamSlot, ...]
    axes: tuple[str, ...]
    policy: str


@dataclass(frozen=True, kw_only=True)
class FlatShard:
    """This rank's shard of a parameter that is part of a flat parameter of FSDP1."""

    shape: tuple[int, ...]
    num_local: int
    dtype: torch.dtype
    is_trainable: bool
    holder: nn.Module  # of the flat parameter
    is_hidden: bool  # the user's module has no parameter of this name any more
    is_part: bool  # `shape` is that of a tensor-parallel shard, which is all that FSDP1 knows


def managed_groups(model: nn.Module) -> Iterator[ManagedGroup]:
    """Every FSDP group in `model`."""
    for group in param_groups_within(model):
        places = [param_places(param) for param in group.fsdp_params]
        is_sharding = group.mesh_info.shard_mesh_dim is not None
        yield ManagedGroup(
            kind=MarkKind.FULLY_SHARD if is_sharding else MarkKind.DDP,
            modules=tuple(group.modules),
            places=tuple(first for first, *_ in places),
            ties=tuple(slot for _, *ties in places for slot in ties),
            axes=_axes_of(group.mesh_info),
            policy=_reshard_policy(group) if is_sharding else "",
        )
    for handle in _flat_handles(model):
        flat = handle.flat_param
        is_sharding = handle._sharding_strategy.name != "NO_SHARD"
        yield ManagedGroup(
            kind=MarkKind.FSDP1 if is_sharding else MarkKind.DDP,
            modules=(flat_handle_module(handle),),
            places=tuple((info.module, info.param_name) for info in flat._param_infos),
            ties=tuple((info.module, info.param_name) for info in flat._shared_param_infos),
            axes=(),
            policy=handle._sharding_strategy.name.lower(),
        )


def modules_under_fsdp(model: nn.Module) -> Iterator[tuple[nn.Module, MarkKind]]:
    """Modules that FSDP was applied to, including those without parameters of their own."""
    replicated = {
        id(module)
        for group in param_groups_within(model)
        for module in group.modules
        if group.mesh_info.shard_mesh_dim is None
    }
    for module in every_module(model):
        if isinstance(module, FSDPModule) and id(module) not in replicated:
            yield module, MarkKind.FULLY_SHARD
        elif isinstance(module, FullyShardedDataParallel):
            yield module, MarkKind.FSDP1


def flat_shards(model: nn.Module) -> dict[tuple[int, str], FlatShard]:
    """The shards of parameters that FSDP1 flattened, by identity of the module and name."""
    shards = {}
    for handle in _flat_handles(model):
        flat = handle.flat_param
        for info, shape, shard, extension in zip(
            flat._param_infos,
            flat._shapes,
            flat._shard_param_infos,
            flat._param_extensions,
            strict=True,
        ):
            shards[id(info.module), info.param_name] = FlatShard(
                shape=tuple(shape),
                num_local=shard.numel_in_shard or 0,
                dtype=flat.dtype,
                is_trainable=_is_trainable(flat, info),
                holder=flat_handle_module(handle),
                is_hidden=not handle._use_orig_params,
                is_part=extension is not None,
            )
        for info in flat._shared_param_infos:
            first = shards[id(info.prim_module), info.prim_param_name]
            shards[id(info.module), info.param_name] = first
    return shards


def has_flat_parameters(model: nn.Module) -> bool:
    """Whether FSDP1 manages any parameter of `model`."""
    return any(True for _ in _flat_handles(model))


def flat_shares(parameter: torch.Tensor, tensor: torch.Tensor) -> list[tuple[nn.Module, int]]:
    """The modules with elements in `tensor`, a flat parameter or a tensor laid out like it.

    Each comes with the number of its elements: in this rank's shard, or in total if `tensor` is
    larger than the shard. Empty if `parameter` is not a flat parameter.
    """
    if not isinstance(parameter, FlatParameter):
        return []
    flat: Any = parameter
    local = [info.numel_in_shard or 0 for info in flat._shard_param_infos]
    sizes = local if tensor.numel() <= flat._sharded_size.numel() else flat._numels
    modules = [info.module for info in flat._param_infos]
    return [(module, size) for module, size in zip(modules, sizes, strict=True) if size]


def _is_trainable(flat: Any, info: Any) -> bool:
    """Whether the user's parameter, or the flat one that replaces it, requires a gradient."""
    own = parameter_named(info.module, info.param_name)
    return bool((flat if own is None else own).requires_grad)


def _flat_handles(model: nn.Module) -> Iterator[Any]:
    for module in every_module(model):
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            yield module._handle


def _axes_of(mesh_info: Any) -> tuple[str, ...]:
    """The names of the axes over which parameters are replicated or sharded, in mesh order."""
    names = axis_names(mesh_info.mesh)
    dims = (mesh_info.replicate_mesh_dim, mesh_info.shard_mesh_dim)
    return tuple(names[dim] for dim in sorted(dim for dim in dims if dim is not None))


def _reshard_policy(group: Any) -> str:
    after = group.post_forward_mesh_info
    if after is None:
        return "stays gathered after forward"
    if after is group.mesh_info or after == group.mesh_info:
        return "reshards after forward"
    return f"reshards after forward over {cast(int, after.shard_mesh_size)} ranks"
