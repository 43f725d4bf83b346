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
        self._nodes = {rank: iter(graph.graph.nodes) for rank, graph in graphs.items()}
        self._inputs = {rank: iter(values) for rank, values in inputs.items()}
        self._groups = groups
        self._values: dict[int, dict[fx.Node, Any]] = {rank: {} for rank in graphs}
        # Ranks draw the same numbers: each goes on from where it was.
        self._random_states = dict.fromkeys(graphs, torch.get_rng_state())
        self._last_uses = {rank: _last_uses(graph.graph) for rank, graph in graphs.items()}

    def run(self) -> dict[int, Any]:
        while True:
            stops = {rank: self._advance(rank) for rank in self._graphs}
            given = {rank: self._arguments(rank, node)[0] for rank, node in stops.items()}
            _check_they_agree(stops)
            target = next(iter(stops.values())).target
            if target == "output":
                return {rank: args[0] for rank, args in given.items()}
            for rank, one in self._meet(target, given).items():
                self._keep(rank, stops[rank], one)

    def _advance(self, rank: int) -> fx.Node:
        """Run a rank alone, to the next node at which it meets others.

        Ranks need not have the same nodes between: one may have to pad its piece.
        """
        for node in self._nodes[rank]:
            if node.op == "output" or is_collective(node.target):
                return node
            self._keep(rank, node, self._run_node(rank, node))
        raise AssertionError("a graph without an output")

    def _keep(self, rank: int, node: fx.Node, value: Any) -> None:
        self._values[rank][node] = value
        self._forget(rank, node)

    def _run_node(self, rank: int, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return next(self._inputs[rank])
        args, kwargs = self._arguments(rank, node)
        if node.target is WAIT:
            return args[0]
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
            _check_they_match(op, {one: given[one] for one in ranks})
            results = _collective(op, [given[one] for one in ranks])
            done.update(zip(ranks, results, strict=True))
        return done


def _check_they_agree(stops: Mapping[int, fx.Node]) -> None:
    """Every rank comes to the same kind of collective, or to its end."""
    first_rank, first = next(iter(stops.items()))
    for rank, node in stops.items():
        if node.target != first.target:
            raise ParallelError(
                f"ranks part: rank {first_rank} comes to {first.target} ({first.name}), rank "
                f"{rank} to {node.target} ({node.name}), and would wait for ever. "
                "This is a fault of shardscope's; please report the program."
            )


def _check_they_match(op: Any, given: Mapping[int, Any]) -> None:
    """What the ranks of one group put in fits together."""
    shown = {
        rank: (tuple(value.shape), value.dtype, *rest) for rank, (value, *rest) in given.items()
    }
    first_rank, first = next(iter(shown.items()))
    for rank, one in shown.items():
        if one != first:
            raise ParallelError(
                f"ranks part: rank {first_rank} calls {op} with {first}, rank {rank} with {one}. "
                "This is a fault of shardscope's; please report the program."
            )


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
