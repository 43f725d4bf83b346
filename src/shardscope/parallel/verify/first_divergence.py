"""Finds the first value of a program that its ranks compute differently than the single device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardscope.parallel.equivalence import (
    Runs,
    StepResult,
    compare,
)
from shardscope.parallel.ir.graph import OpNode, Origin, ShardingGraph, Value
from shardscope.parallel.ir.mesh import Mesh
from shardscope.parallel.ir.reference_sharding import unshard_tensor
from shardscope.parallel.passes.lower import RankProgram
from shardscope.parallel.verify.lockstep import run_in_lockstep
from shardscope.parallel.verify.verify import run_single_device
from shardscope.record import FINE


def find_first_divergence(
    graph: ShardingGraph,
    mesh: Mesh,
    single: fx.GraphModule,
    ranks: Mapping[int, RankProgram],
    values: Sequence[Any],
    shards: Mapping[int, Sequence[Any]],
    groups: Mapping[str, Sequence[int]],
) -> Origin | None:
    """The origin of the first op of the forward pass whose result differs; None if none does.

    `single` is the program of the single device and `values` its arguments; `shards` are those of
    each rank, and `groups` the ranks of each process group. Every value is compared as results are:
    within the noise of the single device, measured for that value.
    """
    runs = run_single_device(lambda arguments: _run_single(single, arguments), values)
    runs_by_value = _split_by_value(runs)
    actual = _run_ranks(ranks, shards, groups)
    for op_node in graph.op_nodes:
        if not isinstance(op_node, OpNode):
            continue
        for value in op_node.outputs:
            is_compared = value.name in runs_by_value and value in actual
            if is_compared and not _agrees(runs_by_value[value.name], actual[value], value, mesh):
                return op_node.origin
    return None


def _run_single(graph: fx.GraphModule, values: Sequence[Any]) -> StepResult:
    """Every tensor that the program computes, by the name of its value, as an output."""
    interpreter = fx.Interpreter(graph, garbage_collect_values=False)
    interpreter.run(*values)
    outputs: list[tuple[str, Tensor]] = []
    for node, result in interpreter.env.items():
        items = result if isinstance(result, list | tuple) else ()
        named = [(node.name, result), *((f"{node.name}_{i}", item) for i, item in enumerate(items))]
        outputs += [(name, item) for name, item in named if isinstance(item, Tensor)]
    return StepResult(outputs, {}, {})


def _split_by_value(runs: Runs) -> dict[str, Runs]:
    """By the name of a value, the runs with that value as their only result."""
    all_results = [
        runs.reference,
        runs.fp64,
        *(result for pair in runs.perturbed_runs for result in pair),
    ]
    tensors = [None if result is None else dict(result.outputs) for result in all_results]

    def choose(name: str) -> Runs:
        reference, fp64, *perturbed = (
            StepResult([(name, named[name])] if named and name in named else [], {}, {})
            for named in tensors
        )
        return Runs(reference, fp64, tuple(zip(perturbed[::2], perturbed[1::2], strict=True)))

    return {name: choose(name) for name, _ in runs.reference.outputs}


def _run_ranks(
    ranks: Mapping[int, RankProgram],
    shards: Mapping[int, Sequence[Any]],
    groups: Mapping[str, Sequence[int]],
) -> dict[Value, dict[int, Tensor]]:
    """The shard that each rank has of every value of the graph."""
    value_of_node = {
        rank: {node: value for value, node in program.nodes.items() if isinstance(node, fx.Node)}
        for rank, program in ranks.items()
    }
    results: dict[Value, dict[int, Tensor]] = {}

    def observe(rank: int, node: fx.Node, result: object) -> None:
        value = value_of_node[rank].get(node)
        if value is not None and value.origin is None and isinstance(result, Tensor):
            results.setdefault(value, {})[rank] = result

    graphs = {rank: program.as_module() for rank, program in ranks.items()}
    torch.manual_seed(0)
    run_in_lockstep(graphs, shards, groups, observe=observe)
    return results


def _agrees(runs: Runs, actual: Mapping[int, Tensor], value: Value, mesh: Mesh) -> bool:
    """Whether the shards of a value make up what the single device computes."""
    shards = {
        coordinate.coordinates: actual[mesh.rank_at(coordinate)] for coordinate in mesh.coordinates
    }
    try:
        full = unshard_tensor(shards, placements=value.placements, sizes=mesh.sizes)
    except (ValueError, RuntimeError):  # replicas differ, or shards do not fit
        return False
    candidate = StepResult([(value.name, full)], {}, {})
    verdicts = compare(runs.reference, runs.fp64, candidate, perturbed_runs=runs.perturbed_runs)
    return all(verdict.agreement in FINE for verdict in verdicts)
