"""Runs the programs of all ranks in one process, each up to the next collective they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from shardscope.comm.lines import user_line
from shardscope.errors import ParallelError
from shardscope.parallel.blame import raise_explained

__all__ = ["Watcher", "run_in_lockstep"]

Watcher = Callable[[int, fx.Node, Any], None]
"""Is shown what each rank's nodes compute."""


def run_in_lockstep(
    graphs: Mapping[int, fx.GraphModule],
    inputs: Mapping[int, Sequence[Any]],
    groups: Mapping[str, Sequence[int]],
    *,
    watch: Watcher | None = None,
) -> dict[int, Any]:
    """What each rank's program returns; `groups` says which ranks share a group's name."""
    state = torch.get_rng_state()
    ranks = {rank: _Rank(rank, graph, inputs[rank], state, watch) for rank, graph in graphs.items()}
    for rank in ranks.values():
        rank.advance()
    while any(rank.waits_at is not None for rank in ranks.values()):
        _meet(ranks, groups)
    return {number: rank.result for number, rank in ranks.items()}


@final
class _Rank:
    """One rank's program, stopped at a collective or done."""

    def __init__(
        self,
        number: int,
        graph: fx.GraphModule,
        inputs: Sequence[Any],
        random_state: Tensor,
        watch: Watcher | None,
    ) -> None:
        self._number = number
        self._interpreter = fx.Interpreter(graph)
        self._nodes = iter(graph.graph.nodes)
        self._inputs = iter(inputs)
        self._last_uses = _last_uses(graph.graph)
        self._values: dict[fx.Node, Any] = {}
        self._watch = watch
        # Ranks draw the same numbers: each goes on from where it was.
        self._random_state = random_state
        self.waits_at: fx.Node | None = None
        self.result: Any = None

    def advance(self, received: Any = None) -> None:
        """Go on, with what the collective gave, to the next one or to the end."""
        if self.waits_at is not None:
            self._keep(self.waits_at, received)
            self.waits_at = None
        for node in self._nodes:
            if is_collective(node.target):
                self.waits_at = node
                return
            if node.op == "output":
                self.result = self.look_up(node.args[0])
                return
            self._keep(node, self._try(node))

    def look_up(self, nest: Any) -> Any:
        """Arguments with values in place of nodes."""
        return fx.node.map_arg(nest, self._values.__getitem__)

    def _try(self, node: fx.Node) -> Any:
        try:
            return self._run(node)
        except Exception as error:  # noqa: BLE001 - it is raised again
            line = user_line(node.meta.get("stack_trace") or "")
            place = f"{node.target} ({node.name}{f', {line}' if line else ''})"
            rank = f"rank {self._number}"
            raise_explained(error, f"{place} fails on {rank}, though not on a single device")

    def _run(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return next(self._inputs)
        args, kwargs = self.look_up(node.args), self.look_up(node.kwargs)
        if node.target is WAIT:
            return args[0]
        run = getattr(self._interpreter, node.op)
        if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            return run(node.target, args, kwargs)
        torch.set_rng_state(self._random_state)
        drawn = run(node.target, args, kwargs)
        self._random_state = torch.get_rng_state()
        return drawn

    def _keep(self, node: fx.Node, value: Any) -> None:
        """Note a value, and drop those that no later node uses: all ranks' are in one memory."""
        if self._watch is not None:
            self._watch(self._number, node, value)
        self._values[node] = value
        for used in self._last_uses.get(node, ()):
            self._values.pop(used, None)


def _meet(ranks: Mapping[int, _Rank], groups: Mapping[str, Sequence[int]]) -> None:
    """Let every group run whose ranks are all there."""
    arrived = {number: rank.waits_at for number, rank in ranks.items() if rank.waits_at is not None}
    done: set[int] = set()
    for number, node in arrived.items():
        if number in done:
            continue
        peers = groups[str(node.args[-1])]
        waiting = [arrived.get(peer) for peer in peers]
        if any(one is None or groups[str(one.args[-1])] != peers for one in waiting):
            continue
        given = [ranks[peer].look_up(arrived[peer].args) for peer in peers]
        for peer, received in zip(peers, _collective(_same_op(arrived, peers), given), strict=True):
            ranks[peer].advance(received)
        done.update(peers)
    if not done:
        raise _hang(arrived)


def _same_op(arrived: Mapping[int, fx.Node], peers: Sequence[int]) -> Any:
    ops = {arrived[peer].target for peer in peers}
    if len(ops) > 1:
        raise _hang({peer: arrived[peer] for peer in peers})
    return ops.pop()


def _hang(arrived: Mapping[int, fx.Node]) -> ParallelError:
    waits = "; ".join(f"rank {number} at {node.name}" for number, node in list(arrived.items())[:4])
    return ParallelError(
        f"ranks would deadlock: {waits}. This is a bug in shardscope; please report the program."
    )


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
    sent = [torch.split(args[0], list(args[2])) for args in given]
    return [torch.cat([one[rank] for one in sent]) for rank in range(num_ranks)]


def _reduce(values: Sequence[Tensor], reduction: str) -> Tensor:
    stacked = torch.stack(tuple(values))
    if reduction == "sum":
        return stacked.sum(0, dtype=stacked.dtype)
    return stacked.amax(0) if reduction == "max" else stacked.amin(0)
