"""Runs the programs of all ranks in one process: node by node, collectives by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, fx

from shardscope._torch.functional_collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    WAIT,
    is_collective,
)
from shardscope.errors import ParallelError

__all__ = ["run_in_lockstep"]


def run_in_lockstep(
    graphs: Mapping[int, fx.GraphModule],
    inputs: Mapping[int, Sequence[Any]],
    groups: Mapping[str, Sequence[int]],
) -> dict[int, Any]:
    """What each rank's program returns; `groups` says which ranks share a group's name."""
    return _Ranks(graphs, inputs, groups).run()


@final
class _Ranks:
    def __init__(
        self,
        graphs: Mapping[int, fx.GraphModule],
        inputs: Mapping[int, Sequence[Any]],
        groups: Mapping[str, Sequence[int]],
    ) -> None:
        self._graphs = graphs
        self._runs = {rank: fx.Interpreter(graph) for rank, graph in graphs.items()}
        self._inputs = {rank: iter(values) for rank, values in inputs.items()}
        self._groups = groups
        self._values: dict[int, dict[fx.Node, Any]] = {rank: {} for rank in graphs}
        # Ranks draw the same numbers: each goes on from where it was.
        self._random_states = dict.fromkeys(graphs, torch.get_rng_state())
        self._last_uses = {rank: _last_uses(graph.graph) for rank, graph in graphs.items()}

    def run(self) -> dict[int, Any]:
        columns = zip(*(list(graph.graph.nodes) for graph in self._graphs.values()), strict=True)
        results: dict[int, Any] = {}
        for column in columns:
            nodes = dict(zip(self._graphs, column, strict=True))
            done = self._step(nodes)
            if column[0].op == "output":
                return done
            for rank, node in nodes.items():
                self._values[rank][node] = done[rank]
                self._forget(rank, node)
        return results

    def _step(self, nodes: Mapping[int, fx.Node]) -> dict[int, Any]:
        first = next(iter(nodes.values()))
        if any((one.op, one.target) != (first.op, first.target) for one in nodes.values()):
            raise ParallelError(
                f"ranks part at {first.name}: they would not run the same collectives. "
                "This is a fault of shardscope's; please report the program."
            )
        if first.op == "placeholder":
            return {rank: next(self._inputs[rank]) for rank in nodes}
        given = {rank: self._arguments(rank, node) for rank, node in nodes.items()}
        if first.op == "output":
            return {rank: args[0] for rank, (args, _) in given.items()}
        if first.target is WAIT:
            return {rank: args[0] for rank, (args, _) in given.items()}
        if is_collective(first.target):
            return self._meet(first.target, {rank: args for rank, (args, _) in given.items()})
        return {rank: self._run_node(rank, node, *given[rank]) for rank, node in nodes.items()}

    def _run_node(self, rank: int, node: fx.Node, args: Any, kwargs: Any) -> Any:
        run = getattr(self._runs[rank], node.op)
        if not _is_random(node.target):
            return run(node.target, args, kwargs)
        torch.set_rng_state(self._random_states[rank])
        drawn = run(node.target, args, kwargs)
        self._random_states[rank] = torch.get_rng_state()
        return drawn

    def _arguments(self, rank: int, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = self._values[rank]
        look = fx.node.map_arg
        return look(node.args, values.__getitem__), look(node.kwargs, values.__getitem__)

    def _forget(self, rank: int, node: fx.Node) -> None:
        """Drop what no later node uses: all ranks' values are in this process's memory."""
        for used in self._last_uses[rank].get(node, ()):
            self._values[rank].pop(used, None)

    def _meet(self, op: Any, given: Mapping[int, Any]) -> dict[int, Any]:
        done: dict[int, Any] = {}
        for rank, args in given.items():
            if rank in done:
                continue
            ranks = self._groups[args[-1]]
            results = _collective(op, [given[one] for one in ranks])
            done.update(zip(ranks, results, strict=True))
        return done


def _is_random(target: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """By node, the nodes whose values nothing after it uses."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last[node] = node
        last.update(dict.fromkeys(node.all_input_nodes, node))
    done: dict[fx.Node, list[fx.Node]] = {}
    for value, user in last.items():
        done.setdefault(user, []).append(value)
    return done


def _collective(op: Any, given: Sequence[Any]) -> list[Tensor]:
    """What each rank of a group gets."""
    values = [args[0] for args in given]
    num_ranks = len(values)
    if op is ALL_REDUCE:
        total = _reduce(values, given[0][1])
        return [total.clone() for _ in values]
    if op is ALL_GATHER:
        together = torch.cat(values)
        return [together.clone() for _ in values]
    if op is REDUCE_SCATTER:
        return [one.clone() for one in _reduce(values, given[0][1]).chunk(num_ranks)]
    assert op is ALL_TO_ALL
    sent = [torch.split(args[0], args[2]) for args in given]
    return [torch.cat([one[rank] for one in sent]) for rank in range(num_ranks)]


def _reduce(values: Sequence[Tensor], reduction: str) -> Tensor:
    stacked = torch.stack(tuple(values))
    if reduction == "sum":
        return stacked.sum(0, dtype=stacked.dtype)
    return stacked.amax(0) if reduction == "max" else stacked.amin(0)
