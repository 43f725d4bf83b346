"""The package spmd_types: annotations of plain tensors, and stack frames of its collectives.

Its tensors are plain: an annotation gives each a type per mesh axis, and the program calls every
collective itself, with the type before and after. The package is read only where a program has
imported it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

PACKAGE = "spmd_types"
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_NAMES = {"R": "Replicate", "I": "Invariant", "V": "Varying", "P": "Partial(sum)"}
_TYPE = re.compile(r"[RIVP]|S\(-?\d+\)")
_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")
_SUFFIX = re.compile(r"\[[^]]*\]$")  # of an axis name that several meshes have


@dataclass(frozen=True, kw_only=True)
class AxisType:
    """The type of a tensor along one mesh axis: `R`, `I`, `V`, `P` or `S(i)`."""

    axis: str
    size: int
    type: str

    @property
    def dim(self) -> int | None:
        """The dim that is sharded along the axis."""
        return int(self.type[2:-1]) if self.type.startswith("S(") else None

    @property
    def name(self) -> str:
        """The type as a word, like a placement: `Shard(0)`, `Replicate`, `Invariant`, …"""
        return f"Shard({self.dim})" if self.dim is not None else _NAMES[self.type]

    @property
    def placement(self) -> Placement | None:
        """The DTensor placement with the same data on every rank; None for `V`."""
        if self.dim is not None:
            return Shard(self.dim)
        return {"R": Replicate(), "I": Replicate(), "P": Partial()}.get(self.type)


def read_annotation(tensor: torch.Tensor) -> tuple[AxisType, ...]:
    """The types of a plain tensor along the mesh axes of its annotation; () if it has none.

    Axes that shard the same dim are in the order in which they shard it.
    """
    package = sys.modules.get(PACKAGE)
    if package is None or isinstance(tensor, DTensor):
        return ()
    return describe_types(package.get_local_type(tensor), package.get_partition_spec(tensor))


def describe_types(local_type: dict[Any, Any], spec: Sequence[Any] | None) -> tuple[AxisType, ...]:
    """The types by axis, with the dims of a PartitionSpec: entries are None, an axis, or axes."""
    axes = list(local_type)
    types = {axis: repr(kind) for axis, kind in local_type.items()}
    for dim, entry in enumerate(spec or ()):
        sharding = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        types |= dict.fromkeys(sharding, f"S({dim})")
        positions = sorted(axes.index(axis) for axis in sharding if axis in local_type)
        for position, axis in zip(positions, sharding, strict=False):
            axes[position] = axis
    return tuple(
        AxisType(axis=name_axis(axis), size=axis.size(), type=types[axis]) for axis in axes
    )


def types_on_mesh(tensor: DTensor, local_type: dict[Any, Any]) -> dict[str, str]:
    """The types by axis of the mesh of a DTensor that was made from an annotated tensor."""
    mesh, axis_of = tensor.device_mesh, sys.modules[PACKAGE].MeshAxis.of
    axes = {name: axis_of(mesh.get_group(name)) for name in mesh.mesh_dim_names or ()}
    return {name: repr(local_type[axis]) for name, axis in axes.items() if axis in local_type}


def name_axis(axis: Any) -> str:
    """The name of a MeshAxis: that of the mesh's axis where there is one, such as `tp`."""
    names = sorted(name for name in axis.names if name != "default_pg")
    name = names[0] if names else repr(axis)
    return _SUFFIX.sub("", name.replace("mesh_", ""))


def is_frame_of_call(code: CodeType) -> bool:
    """Whether code of the package is a function that changes a type, given as `src` and `dst`."""
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return not code.co_name.startswith("_") and {"src", "dst"} <= set(arguments)


def is_frame_of_backward(code: CodeType) -> bool:
    """Whether code of the package is the backward of one of its autograd functions."""
    return code.co_name == "backward" and code.co_qualname.startswith("_")


def read_types(src: object, dst: object) -> tuple[str, str] | None:
    """The types before and after, as text; None if they are not types along one axis."""
    types = repr(src), repr(dst)
    return types if all(_TYPE.fullmatch(kind) for kind in types) else None


def name_forward(code: CodeType) -> str:
    """The function whose backward the code is: `all_gather` for `_AllGatherShard.backward`."""
    words = _CAPITAL.sub("_", code.co_qualname.split(".")[0].lstrip("_")).lower()
    for name in (*_COLLECTIVES, "convert"):
        if words.startswith(name):
            return name
    return "convert" if words == "invariant_to_replicate" else "reinterpret"
