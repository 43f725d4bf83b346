"""Runs the programs of all ranks in one process, each up to its next collective.

`shard_values` makes the arguments of each rank, and `join_results` full tensors of the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, fx
from torch.fx.node import Target

from shardscope._torch.collectives.functional import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    WAIT,
    is_collective,
)
from shardscope._torch.process_groups.collective_semantics import (
    CollectiveRequest,
    collective_results,
    split_for_ranks,
)
from shardscope.attribution.call_sites import user_line
from shardscope.errors import ParallelError
from shardscope.parallel.ir.graph import ShardingGraph, raise_explained
from shardscope.parallel.ir.mesh import Mesh
from shardscope.parallel.ir.shard_spec import (
    Coordinates,
    MeshCoordinate,
    ShardSpec,
    local_shard,
    unshard_tensor,
)
from shardscope.parallel.runtime.rank_function import last_uses
from shardscope.plan.placements import Replicate, Shard

NodeObserver = Callable[[int, fx.Node, object], None]
"""Is shown what each rank's nodes compute."""


def run_in_lockstep(
    graphs: Mapping[int, fx.GraphModule],
    inputs: Mapping[int, Sequence[object]],
    groups: Mapping[str, Sequence[int]],
    *,
    observe: NodeObserver | None = None,
) -> dict[int, Sequence[object]]:
    """By rank, what its program returns; `groups` has the ranks of each group by its name."""
    state = torch.get_rng_state()
    ranks = {
        rank: _Rank(rank, graph, inputs[rank], state, observe) for rank, graph in graphs.items()
    }
    for rank in ranks.values():
        rank.advance()
    while any(rank.waiting_node is not None for rank in ranks.values()):
        _run_collectives(ranks, groups)
    return {number: rank.result for number, rank in ranks.items()}


@final
class _Rank:
    """One rank's program, waiting at a collective or finished."""

    def __init__(
        self,
        number: int,
        graph: fx.GraphModule,
        inputs: Sequence[object],
        random_state: Tensor,
        observe: NodeObserver | None,
    ) -> None:
        self._number = number
        self._interpreter = fx.Interpreter(graph)
        self._nodes = iter(graph.graph.nodes)
        self._inputs = iter(inputs)
        self._last_uses = last_uses(graph.graph)
        self._values: dict[fx.Node, Any] = {}
        self._observe = observe
        # Each rank has its own RNG state, so that all draw the same numbers.
        self._random_state = random_state
        self.waiting_node: fx.Node | None = None
        self.result: Sequence[object] = ()

    def advance(self, received: Tensor | None = None) -> None:
        """Run, with the result of the collective, to the next collective or to the end."""
        if self.waiting_node is not None:
            self._store(self.waiting_node, received)
            self.waiting_node = None
        for node in self._nodes:
            if is_collective(node.target):
                self.waiting_node = node
                return
            if node.op == "output":
                self.result = self.look_up(node.args[0])
                return
            self._store(node, self._run_or_explain(node))

    def look_up(self, nest: Any) -> Any:
        """Nested arguments, with nodes replaced by their values."""
        return fx.node.map_arg(nest, self._values.__getitem__)

    def _run_or_explain(self, node: fx.Node) -> object:
        try:
            return self._run(node)
        except Exception as error:  # noqa: BLE001 - it is raised again
            line = user_line(node.meta.get("stack_trace") or "")
            location = f"{node.target} ({node.name}{f', {line}' if line else ''})"
            rank = f"rank {self._number}"
            raise_explained(error, f"{location} fails on {rank}, though not on a single device")

    def _run(self, node: fx.Node) -> object:
        if node.op == "placeholder":
            return next(self._inputs)
        args, kwargs = self.look_up(node.args), self.look_up(node.kwargs)
        if node.target is WAIT:
            return args[0]
        run = getattr(self._interpreter, node.op)
        if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            return run(node.target, args, kwargs)
        torch.set_rng_state(self._random_state)
        result = run(node.target, args, kwargs)
        self._random_state = torch.get_rng_state()
        return result

    def _store(self, node: fx.Node, value: object) -> None:
        """Store a node's value, and free those that no later node uses."""
        if self._observe is not None:
            self._observe(self._number, node, value)
        self._values[node] = value
        for used in self._last_uses.get(node, ()):
            self._values.pop(used, None)


def _run_collectives(ranks: Mapping[int, _Rank], groups: Mapping[str, Sequence[int]]) -> None:
    """Run the collective of every group whose ranks all wait at it; raise if there is none."""
    waiting_nodes = {
        number: rank.waiting_node for number, rank in ranks.items() if rank.waiting_node is not None
    }
    finished: set[int] = set()
    for number, node in waiting_nodes.items():
        if number in finished:
            continue
        peers = groups[str(node.args[-1])]
        peer_nodes = [waiting_nodes.get(peer) for peer in peers]
        if any(
            peer_node is None or groups[str(peer_node.args[-1])] != peers
            for peer_node in peer_nodes
        ):
            continue
        arguments = [ranks[peer].look_up(waiting_nodes[peer].args) for peer in peers]
        for peer, received in zip(
            peers, _run_collective(_same_op(waiting_nodes, peers), arguments), strict=True
        ):
            ranks[peer].advance(received)
        finished.update(peers)
    if not finished:
        raise _deadlock_error(waiting_nodes)


def _same_op(waiting_nodes: Mapping[int, fx.Node], peers: Sequence[int]) -> Target:
    ops = {waiting_nodes[peer].target for peer in peers}
    if len(ops) > 1:
        raise _deadlock_error({peer: waiting_nodes[peer] for peer in peers})
    return ops.pop()


def _deadlock_error(waiting_nodes: Mapping[int, fx.Node]) -> ParallelError:
    waits = "; ".join(
        f"rank {number} at {node.name}" for number, node in list(waiting_nodes.items())[:4]
    )
    return ParallelError(
        f"ranks would deadlock: {waits}. This is a bug in shardscope; please report the program."
    )


def _run_collective(op: Target, arguments: Sequence[Sequence[Any]]) -> list[Tensor]:
    """The result of a functional collective on each rank of a group, given the arguments of each.

    The arguments are `(input, …, group name)`, with the reduction or the output and input splits
    in between, as in the op's schema.
    """
    results = collective_results([_make_request(op, args) for args in arguments])
    return [
        torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0].clone() for tensors in results
    ]


def _make_request(op: Target, args: Sequence[Any]) -> CollectiveRequest:
    tensor = args[0]
    if op is ALL_REDUCE:
        return CollectiveRequest("all_reduce", [tensor], reduction=args[1].upper())
    if op is ALL_GATHER:
        return CollectiveRequest("all_gather", [tensor])
    if op is REDUCE_SCATTER:
        parts = split_for_ranks(tensor, args[2])
        return CollectiveRequest("reduce_scatter", parts, reduction=args[1].upper())
    assert op is ALL_TO_ALL
    output_splits, input_splits = args[1], args[2]
    return CollectiveRequest(
        "all_to_all_single", [tensor], input_splits=input_splits, output_splits=output_splits
    )


def shard_values(
    graph: ShardingGraph, mesh: Mesh, values: Sequence[object]
) -> dict[int, list[object]]:
    """By rank, its shards of the program's arguments."""
    return {
        mesh.rank_at(coordinate): [
            _shard_value(argument, value.spec, coordinate)
            for argument, (value, _) in zip(values, graph.inputs, strict=True)
        ]
        for coordinate in mesh.coordinates
    }


def _shard_value(value: object, spec: ShardSpec, coordinate: MeshCoordinate) -> object:
    if not isinstance(value, Tensor):
        return value
    return local_shard(value.detach(), spec=spec, coordinate=coordinate).clone()


def ranks_by_group(mesh: Mesh) -> dict[str, Sequence[int]]:
    """By group name, as in the programs, the ranks of the group."""
    return {
        mesh.group_name(axis, coordinate): mesh.group_ranks(axis, coordinate)
        for coordinate in mesh.coordinates
        for axis in range(len(mesh.sizes))
    }


def join_results(
    results: Mapping[int, Sequence[object]], specs: Sequence[ShardSpec | None], mesh: Mesh
) -> dict[int, list[object]]:
    """By rank, its results as full tensors, joined with the shards of its peers.

    `specs` has the placements of each result, and None for a result that is not a tensor.
    """
    joined: dict[int, list[object]] = {rank: [] for rank in results}
    for index, spec in enumerate(specs):
        column = {rank: outputs[index] for rank, outputs in results.items()}
        if spec is not None:
            shards = {rank: shard for rank, shard in column.items() if isinstance(shard, Tensor)}
            column = dict(_join_shards(shards, spec, mesh))
        for rank, result in column.items():
            joined[rank].append(result)
    return joined


def _join_shards(shards: dict[int, Tensor], spec: ShardSpec, mesh: Mesh) -> dict[int, Tensor]:
    for axis in reversed(range(len(mesh.sizes))):
        placement = spec.placements[axis]
        if isinstance(placement, Replicate):
            continue
        assert isinstance(placement, Shard), "a program returns no partial values"
        joined: dict[int, Tensor] = {}
        for coordinate in mesh.coordinates:
            if mesh.rank_at(coordinate) not in joined:
                peers = mesh.group_ranks(axis, coordinate)
                parts: dict[Coordinates, Tensor] = {
                    (i,): shards[rank] for i, rank in enumerate(peers)
                }
                full = unshard_tensor(parts, placements=[placement], sizes=[len(peers)])
                joined.update(dict.fromkeys(peers, full))
        shards = joined
    return shards
