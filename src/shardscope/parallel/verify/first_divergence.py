"""Finds the first value of a program that its ranks compute differently than the single device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardscope.numerics.noise import epsilon
from shardscope.parallel.ir.graph import OpNode, Origin, ShardingGraph, Value
from shardscope.parallel.ir.mesh import Mesh
from shardscope.parallel.ir.reference_sharding import unshard_tensor
from shardscope.parallel.passes.lower import RankProgram
from shardscope.parallel.verify.lockstep import run_in_lockstep

_MAX_ULPS = 1e3  # units in the last place: more than another order of summation explains


def find_first_divergence(
    graph: ShardingGraph,
    mesh: Mesh,
    single: fx.GraphModule,
    ranks: Mapping[int, RankProgram],
    values: Sequence[Any],
    shards: Mapping[int, Sequence[Any]],
    groups: Mapping[str, Sequence[int]],
) -> Origin | None:
    """The origin of the first op of the forward pass whose result differs; None if none does."""
    expected_by_name = _run_single(single, values)
    actual = _run_ranks(ranks, shards, groups)
    for op_node in graph.op_nodes:
        if not isinstance(op_node, OpNode):
            continue
        for value in op_node.outputs:
            expected = expected_by_name.get(value.name)
            if expected is None or not value.is_tensor or value not in actual:
                continue
            if not _agrees(actual[value], expected, value, mesh):
                return op_node.origin
    return None


def _run_single(graph: fx.GraphModule, values: Sequence[Any]) -> dict[str, Any]:
    interpreter = fx.Interpreter(graph, garbage_collect_values=False)
    torch.manual_seed(0)
    interpreter.run(*values)
    results: dict[str, Any] = {}
    for node, value in interpreter.env.items():
        if isinstance(value, (list, tuple)):
            results.update({f"{node.name}_{i}": item for i, item in enumerate(value)})
        results[node.name] = value
    return results


def _run_ranks(
    ranks: Mapping[int, RankProgram],
    shards: Mapping[int, Sequence[Any]],
    groups: Mapping[str, Sequence[int]],
) -> dict[Value, dict[int, Any]]:
    value_of_node = {
        rank: {node: value for value, node in program.nodes.items() if isinstance(node, fx.Node)}
        for rank, program in ranks.items()
    }
    results: dict[Value, dict[int, Any]] = {}

    def observe(rank: int, node: fx.Node, result: Any) -> None:
        value = value_of_node[rank].get(node)
        if value is not None and value.origin is None:
            results.setdefault(value, {})[rank] = result

    graphs = {rank: program.as_module() for rank, program in ranks.items()}
    torch.manual_seed(0)
    run_in_lockstep(graphs, shards, groups, observe=observe)
    return results


def _agrees(actual: Mapping[int, Any], expected: Any, value: Value, mesh: Mesh) -> bool:
    if not isinstance(expected, Tensor):
        return True
    shards = {
        coordinate.coordinates: actual[mesh.rank_at(coordinate)] for coordinate in mesh.coordinates
    }
    try:
        full = unshard_tensor(shards, placements=value.placements, sizes=mesh.sizes)
    except (ValueError, RuntimeError):  # replicas differ, or shards do not fit
        return False
    if not expected.is_floating_point() and not expected.is_complex():
        return torch.equal(full, expected)
    # Equal infinities, such as those of a mask, have no difference, and NaN none to NaN.
    is_same = (full == expected) | (full.isnan() & expected.isnan())
    difference = (full - expected).abs().masked_fill(is_same, 0.0)
    magnitudes = expected.abs().masked_fill(~expected.isfinite(), 0.0)
    return (
        bool((difference <= _MAX_ULPS * epsilon(expected.dtype) * magnitudes.amax()).all())
        if difference.numel()
        else True
    )
