"""A model laid out on a mesh as a plan says, on stand-ins, so that the user's own stays plain."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from shardscope._torch.modules import every_module, named_places, own_parameters
from shardscope._torch.propagation import local_part
from shardscope.errors import CoverageError
from shardscope.shard.dispatch import describe

__all__ = ["Layout", "Plan", "parallelize_copy", "read_layout"]

Placements = Placement | Sequence[Placement]
Plan = Mapping[str, Placements] | Callable[[nn.Module, DeviceMesh], Any]
"""Placements by patterns of parameter names, or a function that shards a model in place."""


@final
class Layout:
    """Where each parameter lies; what no pattern names is whole on every rank."""

    def __init__(self, mesh: DeviceMesh, places: dict[int, tuple[Placement, ...]]) -> None:
        self._mesh = mesh
        self._places = places

    def lay_out(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A stand-in for `tensor` on the mesh, without data."""
        whole = tuple(Replicate() for _ in range(self._mesh.ndim))
        place = self._places.get(id(tensor), whole)
        shape = local_part(tensor.shape, self._mesh, place)
        local = torch.empty(shape, dtype=tensor.dtype, device=device)
        return DTensor.from_local(
            local, self._mesh, place, run_check=False, shape=tensor.shape, stride=tensor.stride()
        ).detach()


def read_layout(model: nn.Module, plan: Mapping[str, Placements], mesh: DeviceMesh) -> Layout:
    """The plan for the parameters of `model`, tied ones too."""
    named = dict(_named_parameters(model))
    places: dict[int, tuple[Placement, ...]] = {}
    for pattern, placements in plan.items():
        place = _read_placements(pattern, placements, mesh)
        matches = [name for name in named if fnmatchcase(name, pattern)]
        for name in matches:
            _check_dims(pattern, name, named[name], place)
        if not matches:
            some = ", ".join(list(named)[:3]) or "no parameters at all"
            raise CoverageError(
                f"the plan names {pattern!r}, but the model has no such parameter (it has "
                f"{some} …). Use full names; * matches anything."
            )
        places |= {id(named[name]): place for name in matches}
    return Layout(mesh, places)


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for place, module in named_places(model):
        for name, parameter in own_parameters(module):
            yield f"{place}.{name}".lstrip("."), parameter


def _read_placements(
    pattern: str, placements: Placements, mesh: DeviceMesh
) -> tuple[Placement, ...]:
    given: Any = placements
    place = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not all(isinstance(one, Placement) for one in place):
        kind = next(type(one).__name__ for one in place if not isinstance(one, Placement))
        raise CoverageError(
            f"the plan gives {pattern!r} a {kind}, which is not a placement. Give Shard(0) or "
            "Replicate() for each axis of the mesh, or, to use parallel styles, a function that "
            "calls parallelize_module."
        )
    if len(place) != mesh.ndim:
        raise CoverageError(
            f"the plan gives {pattern!r} {len(place)} placements, but the mesh has "
            f"{mesh.ndim} {'axis' if mesh.ndim == 1 else 'axes'}. Give one for each axis."
        )
    return place


def _check_dims(
    pattern: str, name: str, parameter: torch.Tensor, place: tuple[Placement, ...]
) -> None:
    for one in place:
        dim = getattr(one, "dim", 0)
        if not -parameter.ndim <= dim < max(1, parameter.ndim):
            raise CoverageError(
                f"the plan gives {pattern!r} {one!r}, but {name} has {parameter.ndim} dims. Give "
                "a dim that it has."
            )


def parallelize_copy(
    model: nn.Module, parallelize: Callable[[nn.Module, DeviceMesh], Any], mesh: DeviceMesh
) -> nn.Module:
    """A copy of `model` on meta, sharded by the function."""
    try:
        sharded = copy.deepcopy(model, _meta_copies(model))
    except Exception as error:
        raise CoverageError(
            f"the model cannot be copied to be sharded ({describe(error)}). Shard it yourself "
            "within simulate(), and call coverage() on it there, without a plan."
        ) from error
    result = parallelize(sharded, mesh)
    return result if isinstance(result, nn.Module) else sharded


def _meta_copies(model: nn.Module) -> dict[int, Any]:
    """What deepcopy() is to take for copies of the tensors, so that it makes none itself."""
    copies: dict[int, Any] = {}
    for module in every_module(model):
        tensors = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
        held = (*module.parameters(recurse=False), *module.buffers(recurse=False), *tensors)
        for tensor in held:
            meta = torch.empty_like(tensor, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            copies[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if is_parameter else meta
    return copies
