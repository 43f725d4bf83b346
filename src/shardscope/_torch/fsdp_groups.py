"""The groups of parameters that FSDP, old or new, gathers and reduces together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from shardscope._torch.fsdp import flat_handle_module, param_group_module, param_groups_within
from shardscope._torch.meshes import axis_names
from shardscope._torch.modules import every_module
from shardscope.record import MarkKind

__all__ = ["FLAT_PARAMETER", "FlatPiece", "ManagedGroup", "flat_pieces", "managed_groups"]

FLAT_PARAMETER = "_flat_param"
"""The name under which FSDP1 registers a group's parameters as one, if it hides the originals."""

Place = tuple[nn.Module, str]


@dataclass(frozen=True, kw_only=True)
class ManagedGroup:
    """Parameters that FSDP handles together, and where the user's modules hold them.

    `module` is what FSDP was applied to. `places` are those of each parameter, `ties` the further
    ones of parameters that are held twice.
    """

    kind: MarkKind
    module: nn.Module
    places: tuple[Place, ...]
    ties: tuple[Place, ...]
    axes: tuple[str, ...]
    policy: str


@dataclass(frozen=True, kw_only=True)
class FlatPiece:
    """What this rank holds of one of the parameters that FSDP1 keeps as a flat one."""

    shape: tuple[int, ...]
    num_local: int
    dtype: torch.dtype
    is_trainable: bool
    holder: nn.Module  # of the flat parameter
    is_hidden: bool  # the user's module no longer has a parameter of this name


def managed_groups(model: nn.Module) -> Iterator[ManagedGroup]:
    """Every group of FSDP's in `model`."""
    for group in param_groups_within(model):
        infos = [param._module_info for param in group.fsdp_params]
        shared = (zip(i.shared_modules, i.shared_param_names, strict=True) for i in infos)
        yield ManagedGroup(
            kind=MarkKind.FULLY_SHARD,
            module=param_group_module(group),
            places=tuple((info.module, info.param_name) for info in infos),
            ties=tuple(place for places in shared for place in places),
            axes=_axes_of(group.mesh_info),
            policy=_reshard_policy(group),
        )
    for handle in _flat_handles(model):
        flat = handle.flat_param
        yield ManagedGroup(
            kind=MarkKind.FSDP1,
            module=flat_handle_module(handle),
            places=tuple((info.module, info.param_name) for info in flat._param_infos),
            ties=tuple((info.module, info.param_name) for info in flat._shared_param_infos),
            axes=(),
            policy=handle._sharding_strategy.name.lower(),
        )


def flat_pieces(model: nn.Module) -> dict[tuple[int, str], FlatPiece]:
    """By module identity and name, what FSDP1 made of the parameters that it flattened."""
    pieces = {}
    for handle in _flat_handles(model):
        flat = handle.flat_param
        shards = zip(flat._param_infos, flat._shapes, flat._shard_param_infos, strict=True)
        for info, shape, shard in shards:
            pieces[id(info.module), info.param_name] = FlatPiece(
                shape=tuple(shape),
                num_local=shard.numel_in_shard or 0,
                dtype=flat.dtype,
                is_trainable=flat.requires_grad,
                holder=flat_handle_module(handle),
                is_hidden=not handle._use_orig_params,
            )
        for info in flat._shared_param_infos:
            first = pieces[id(info.prim_module), info.prim_param_name]
            pieces[id(info.module), info.param_name] = first
    return pieces


def _flat_handles(model: nn.Module) -> Iterator[Any]:
    for module in every_module(model):
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            yield module._handle


def _axes_of(mesh_info: Any) -> tuple[str, ...]:
    """The axes over which parameters are replicated and sharded, in the order of the mesh."""
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
