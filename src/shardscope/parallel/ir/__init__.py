"""The partitioner's intermediate representation: what its passes read and rewrite.

A program is a `ShardingGraph` of values, op nodes and reshards. Along each axis of a `Mesh`, each
value has a placement (`Replicate`, `Shard`, `Partial`) and each op node a `Strategy`, the
placements of its inputs and outputs. A `ShardSpec` is a tensor's shape with its placements along
all axes; the local shape at a `MeshCoordinate` follows from it. Sizes are numbers or sympy
expressions (`SymbolicSizes`). `shard_tensor` and `unshard_tensor` apply placements to real tensors.
"""

from shardscope.parallel.ir.graph import (
    Attribute,
    Op,
    OpNode,
    Origin,
    Reshard,
    Result,
    Role,
    RoleKind,
    ShardingGraph,
    Strategy,
    SymbolicSizes,
    Value,
    describe_origin,
    error_context,
    explained,
    find_sharded_symbols,
    map_nest,
    raise_explained,
    symbols_in,
    values_in,
)
from shardscope.parallel.ir.mesh import Mesh, describe_axes, read_mesh
from shardscope.parallel.ir.shard_spec import (
    Coordinates,
    MeshCoordinate,
    ShardSpec,
    all_coordinates,
    grad_placement,
    local_shard,
    shard_tensor,
    unshard_tensor,
)

__all__ = [
    "Attribute",
    "Coordinates",
    "Mesh",
    "MeshCoordinate",
    "Op",
    "OpNode",
    "Origin",
    "Reshard",
    "Result",
    "Role",
    "RoleKind",
    "ShardSpec",
    "ShardingGraph",
    "Strategy",
    "SymbolicSizes",
    "Value",
    "all_coordinates",
    "describe_axes",
    "describe_origin",
    "error_context",
    "explained",
    "find_sharded_symbols",
    "grad_placement",
    "local_shard",
    "map_nest",
    "raise_explained",
    "read_mesh",
    "shard_tensor",
    "symbols_in",
    "unshard_tensor",
    "values_in",
]
