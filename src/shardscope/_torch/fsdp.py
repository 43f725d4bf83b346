"""FSDP1 and FSDP2: parameter groups, which are gathered and reduced together, and their meshes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import type_before_parametrizations

from shardscope._torch.ddp import REPLICATED
from shardscope._torch.mesh import axis_names
from shardscope._torch.modules import every_module, own_parameters, parameter_named
from shardscope._torch.private import find_class
from shardscope._torch.spmd_types import types_on_mesh
from shardscope.record import MarkKind

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
    return [(param_locations(param)[0][0], param.sharded_param.numel()) for param in params]


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


def meshes_of(model: nn.Module) -> Iterator[DeviceMesh]:
    """Every mesh of the DTensor parameters and FSDP groups of `model`."""
    for module in every_module(model):
        for _, parameter in own_parameters(module):
            if isinstance(parameter, DTensor):
                yield parameter.device_mesh
    yield from fsdp_meshes(model)


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was called on any part of `model`."""
    return any(isinstance(module, FSDPModule) for module in every_module(model))


def asks_for_rounding(model: nn.Module) -> bool:
    """Whether a policy of FSDP2, or a hook of DDP, asks for another dtype of gradients."""
    hooks = (getattr(module, "_comm_hooks", None) for module in every_module(model))
    policies = (
        param.mp_policy for group in param_groups_within(model) for param in group.fsdp_params
    )
    return any(hooks) or any(
        policy.param_dtype is not None or policy.reduce_dtype is not None for policy in policies
    )


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
        for module, name in param_locations(param)
    }


def annotated_parameters(model: nn.Module) -> dict[tuple[int, str], dict[str, str]]:
    """The spmd_types annotations of FSDP2's parameters, by identity of the module and name.

    Each has the types by axis of the mesh of the sharded parameter. torch 2.13 does not keep them.
    """
    return {
        (id(module), name): types_on_mesh(param.sharded_param, param._spmd_init_local_type)
        for group in param_groups_within(model)
        for param in group.fsdp_params
        if getattr(param, "is_spmd_types", False)
        for module, name in param_locations(param)
    }


def param_locations(param: Any) -> list[tuple[nn.Module, str]]:
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


FlatParameter = find_class(
    "torch.distributed.fsdp._flat_param.FlatParameter",
    "recognise the flat parameters of FSDP1",
)
FLAT_PARAMETER = "_flat_param"
"""The name of FSDP1's flat parameter, if it hides the original parameters."""

ParamLocation = tuple[nn.Module, str]  # a module and the name of its parameter


@dataclass(frozen=True, kw_only=True)
class FsdpGroup:
    """An FSDP group, with the modules and names of its parameters.

    `modules` are those that FSDP was applied to, several if in one call. `locations` has the module
    and name of each parameter, `ties` the further ones of tied parameters.
    """

    kind: MarkKind
    modules: tuple[nn.Module, ...]
    locations: tuple[ParamLocation, ...]
    ties: tuple[ParamLocation, ...]
    axes: tuple[str, ...]
    policy: str
    options: tuple[str, ...] = ()  # that differ from torch's default


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


def fsdp_groups(model: nn.Module) -> Iterator[FsdpGroup]:
    """Every FSDP group in `model`."""
    for group in param_groups_within(model):
        locations = [param_locations(param) for param in group.fsdp_params]
        is_sharding = group.mesh_info.shard_mesh_dim is not None
        yield FsdpGroup(
            kind=MarkKind.FULLY_SHARD if is_sharding else MarkKind.DDP,
            modules=tuple(group.modules),
            locations=tuple(first for first, *_ in locations),
            ties=tuple(tie for _, *ties in locations for tie in ties),
            axes=_axes_of(group.mesh_info),
            policy=_reshard_policy(group) if is_sharding else "",
            options=tuple(_read_options(group)),
        )
    for handle in _flat_handles(model):
        flat = handle.flat_param
        is_sharding = handle._sharding_strategy.name != "NO_SHARD"
        yield FsdpGroup(
            kind=MarkKind.FSDP1 if is_sharding else MarkKind.DDP,
            modules=(flat_handle_module(handle),),
            locations=tuple((info.module, info.param_name) for info in flat._param_infos),
            ties=tuple((info.module, info.param_name) for info in flat._shared_param_infos),
            axes=(),
            policy=handle._sharding_strategy.name.lower(),
        )


# Options that a group has as attributes of the same name, with torch's default.
_DEFAULTS: dict[str, object] = {
    "reshard_after_backward": True,
    "gradient_divide_factor": None,
    "reduce_scatter_unused_params": False,
    "reduce_scatter_max_input_buffers": 1,
    "force_sum_reduction_for_comms": False,
    "unshard_in_backward": True,
}
# By the first part of the name of a class of torch's: the option that makes FSDP use it.
_COMMS = {
    "SymmMem": "symm_mem_for_comm=NCCL",
    "ProcessGroupAlloc": "allocate_memory_from_process_group_for_comm=True",
}


def _read_options(group: Any) -> Iterator[str]:
    """The options of a group that differ from torch's default; older torch has fewer of them."""
    for option, default in _DEFAULTS.items():
        value = getattr(group, option, default)
        if value != default:
            yield f"{option}={value}"
    if not group.reduce_grads:
        yield "requires_gradient_sync=False"
    elif not group.all_reduce_grads:
        yield "requires_all_reduce=False"
    yield from _read_comms(group)
    hook = getattr(group, "_all_reduce_hook", None)
    if hook is not None:
        yield f"all_reduce_hook={getattr(hook, '__qualname__', type(hook).__name__)}"
    if group.fsdp_params:
        yield from _read_policies(group.fsdp_params)
    dims = getattr(group.mesh_info, "dp_mesh_dims", None)
    if dims is not None:
        yield f"dp_mesh_dims=shard {dims.shard}, replicate {dims.replicate}"


def _read_comms(group: Any) -> Iterator[str]:
    """How a group allocates the buffers of its collectives, or which classes replace torch's."""
    options: dict[str, None] = {}  # in order; the same option may hold for both collectives
    for kind in ("all_gather", "reduce_scatter"):
        name = type(getattr(group, f"_{kind}_comm", None)).__name__
        if not name.startswith(("Default", "NoneType")):
            known = (option for prefix, option in _COMMS.items() if name.startswith(prefix))
            options[next(known, f"custom_{kind}={name}")] = None
    yield from options


def _read_policies(params: Sequence[Any]) -> Iterator[str]:
    policy = params[0].mp_policy
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, name)
        if dtype is not None:
            yield f"{name}={str(dtype).removeprefix('torch.')}"
    if not policy.cast_forward_inputs:
        yield "cast_forward_inputs=False"
    if params[0].offload_to_cpu:
        yield f"offload_policy=CPUOffloadPolicy(pin_memory={params[0].pin_memory})"
    dims = Counter(param.fsdp_placement.dim for param in params)
    yield from (
        f"shard_placement_fn=Shard({dim}) for {number} of {len(params)}"
        for dim, number in sorted(dims.items())
        if dim != 0
    )


def shared_across_groups(model: nn.Module) -> list[list[ParamLocation]]:
    """Parameters that were shared by modules of several FSDP2 groups; [] in torch before 2.13.

    Each is a list of its modules and names, one for each group. torch refuses them when the model
    is first called.
    """
    locations: dict[int, list[ParamLocation]] = {}
    for group in param_groups_within(model):
        for param in group.fsdp_params:
            uid = getattr(param, "_orig_param_uid", None)
            if uid is not None:
                locations.setdefault(uid, []).append(param_locations(param)[0])
    return [shared for shared in locations.values() if len(shared) > 1]


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
