"""FSDP's parameter groups: their modules, parameters and meshes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.parametrize import type_before_parametrizations

from shardscope._torch.ddp import REPLICATED
from shardscope._torch.modules import every_module

_MADE_NAMES = ("FSDP", "DDP", "Replicate")


def param_group_modules(group: Any) -> tuple[nn.Module, ...]:
    """The modules that `fully_shard` was called on for this parameter group."""
    return tuple(group.modules)


def param_group_size(group: Any) -> int:
    """The number of parameters of the group."""
    return len(group.fsdp_params)


def param_group_shares(group: Any) -> list[tuple[nn.Module, int]]:
    """The module and number of local elements of each of a group's parameters; [] for None."""
    params = () if group is None else group.fsdp_params
    return [(param_places(param)[0][0], param.sharded_param.numel()) for param in params]


def flat_handle_size(handle: Any) -> int:
    """The number of parameters in FSDP1's flat parameter."""
    return len(handle.flat_param._param_infos)


def flat_handle_module(handle: Any) -> nn.Module:
    """The module whose flat parameter FSDP1's handle manages."""
    module: nn.Module = handle._fully_sharded_module
    return module


def fsdp_meshes(model: nn.Module) -> Iterator[DeviceMesh]:
    """The meshes that FSDP2 uses for any part of `model`."""
    for group in param_groups_within(model):
        yield group.mesh_info.mesh


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was called on any part of `model`."""
    return any(isinstance(module, FSDPModule) for module in every_module(model))


def is_offloaded(model: nn.Module) -> bool:
    """Whether FSDP2 keeps any parameter of `model` on the host."""
    return any(
        param.offload_to_cpu for group in param_groups_within(model) for param in group.fsdp_params
    )


def empty_on_device(model: nn.Module, device: str) -> None:
    """Like `model.to_empty(device=…)`, but parameters that FSDP2 offloads stay on the host."""
    offloaded = {
        id(param.sharded_param)
        for group in param_groups_within(model)
        for param in group.fsdp_params
        if param.offload_to_cpu
    }
    model._apply(
        lambda tensor: torch.empty_like(tensor, device="cpu" if id(tensor) in offloaded else device)
    )


def sharded_parameters(model: nn.Module) -> dict[tuple[int, str], torch.Tensor]:
    """FSDP2's sharded parameters by identity of the module and name, even while gathered."""
    return {
        (id(module), name): param.sharded_param
        for group in param_groups_within(model)
        for param in group.fsdp_params
        for module, name in param_places(param)
    }


def param_places(param: Any) -> list[tuple[nn.Module, str]]:
    """The module and name of an FSDP2 parameter, then those of parameters tied to it."""
    info = param._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return [(info.module, info.param_name), *shared]


def outermost_module(module: nn.Module) -> nn.Module:
    """FSDP2's root module above `module`; `module` itself without FSDP2 or before its first run."""
    if isinstance(module, FSDPModule):
        for state in module._get_fsdp_state()._state_ctx.all_states:
            if state._is_root:
                root: nn.Module = state._modules[0]
                return root
    return module


def param_groups_within(model: nn.Module) -> Iterator[Any]:
    """FSDP2's parameter groups in `model`, outermost first."""
    seen_ids: set[int] = set()  # modules sharded together share a state
    for module in every_module(model):
        if isinstance(module, FSDPModule):
            for group in _param_groups(module._get_fsdp_state()):
                if id(group) not in seen_ids:
                    seen_ids.add(id(group))
                    yield group


def _param_groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def user_class(module: nn.Module) -> type:
    """The class that the user wrote, which `fully_shard` replaces by a generated subclass."""
    cls = type_before_parametrizations(module)
    mixed_in = (FSDPModule, REPLICATED)
    while cls.__name__.startswith(_MADE_NAMES) and issubclass(cls, mixed_in):
        bases = [base for base in cls.__bases__ if base not in mixed_in]
        if len(bases) != 1 or bases[0] is nn.Module or not issubclass(bases[0], nn.Module):
            break
        cls = bases[0]
    return cls
