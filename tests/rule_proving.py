"""Helpers of tests of sharding rules: random tensors, and the proved strategies of an op."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from rule_proof import prove
from rule_sample import make_sample
from rule_strategies import find_strategies
from shardscope.parallel.sharding_rules.registry import find_decomposition, find_rule
from shardscope.plan.placements import Partial, Placement, Replicate, Shard

__all__ = [
    "decompose",
    "format_strategies",
    "numbers",
    "positives",
    "propagate_shards",
    "prove_strategies",
    "trainable",
    "without_blocks",
]


_CHANCE = torch.Generator().manual_seed(0)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_CHANCE)


def positives(*shape: int) -> torch.Tensor:
    return numbers(*shape).abs() + 0.1


def prove_strategies(
    op: Any,
    *args: Any,
    sizes: Sequence[int] = (2,),
    candidate_placements: Sequence[Sequence[Placement]] = (),
    kwargs: Mapping[str, Any] | None = None,
    constants: Collection[str] = (),
) -> set[str]:
    """Every strategy of the op's rule, as text, after all of them were proved."""
    verdicts = prove(
        op,
        args,
        kwargs,
        sizes=sizes,
        candidate_placements=candidate_placements,
        constants=constants,
    )
    refuted = {
        format_strategies(verdict.strategies): verdict.refutation
        for verdict in verdicts
        if verdict.refutation
    }
    assert refuted == {}, f"{op} cannot run as its rule says: {refuted}"
    return {format_strategies(verdict.strategies) for verdict in verdicts}


def without_blocks(strategies: set[str]) -> set[str]:
    """The strategies without shards in blocks."""
    return {strategy for strategy in strategies if re.search(r"\dx\)|, \(", strategy) is None}


def format_strategies(strategies: Sequence[Any]) -> str:
    """`S(0) R -> S(0)`, with a `;` between mesh axes."""
    return "; ".join(
        f"{' '.join(map(str, strategy.inputs))} -> {' '.join(map(str, strategy.outputs))}"
        for strategy in strategies
    )


def propagate_shards(
    function: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    input_placements: Sequence[Placement],
) -> tuple[list[str], Placement]:
    """The reductions that a function needs when its inputs have these placements, and its result's
    placement.

    Fails if a shard would have to be gathered: no op may need that.
    """
    graph = make_fx(function, pre_dispatch=True)(*tensors).graph
    values: dict[Any, Any] = {}
    node_placements: dict[Any, Placement] = {}
    free: set[Any] = set()  # not reached by gradients
    reduced: list[str] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            node_placements[node], values[node] = (
                input_placements[len(values)],
                tensors[len(values)],
            )
        elif node.op == "call_function" and node.target is not operator.getitem:
            args = torch.fx.map_arg(node.args, values.__getitem__)
            sample = make_sample(node.target, args, torch.fx.map_arg(node.kwargs, values.get))
            values[node], taken = sample.outputs[0], node.all_input_nodes
            if node.target is torch.ops.aten.detach.default or (taken and free >= set(taken)):
                free.add(node)
            call = sample.as_call(num_ranks=2, is_training=node not in free)
            inputs = [argument for argument in node.args if isinstance(argument, torch.fx.Node)]
            node_placements[node] = _choose(call, inputs, node_placements, reduced)
        elif node.op == "output":
            first = node.args[0][0] if isinstance(node.args[0], tuple | list) else node.args[0]
            return reduced, node_placements[first]
    raise AssertionError("a graph without an output")


def _choose(
    call: Any, nodes: list[Any], node_placements: dict[Any, Placement], reduced: list[str]
) -> Placement:
    """The result's placement where no shard is gathered; partial inputs may be reduced
    first, once.
    """
    for is_summed in (False, True):
        if is_summed:
            for node in nodes:
                if isinstance(node_placements[node], Partial):
                    reduced.append(str(node_placements[node]))
                    node_placements[node] = Replicate()
        wanted = [node_placements[node] for node in nodes]
        if all(isinstance(placement, Replicate) for placement in wanted):
            return Replicate()
        listed = find_strategies(call)
        # Replicated inputs may be sharded: that needs no communication.
        fitting = [strategy for strategy in listed if list(strategy.inputs) == wanted] or [
            strategy
            for strategy in listed
            if all(
                a == b or (a == Replicate() and isinstance(b, Shard))
                for a, b in zip(wanted, strategy.inputs, strict=True)
            )
        ]
        if fitting:
            return fitting[0].outputs[0]
    raise AssertionError(
        f"{call.op} would have to gather {[str(node_placements[node]) for node in nodes]}"
    )


def decompose(op: Any, *args: Any, **kwargs: Any) -> None:
    """Prove an op's decomposition: the same results and gradients, of ops that have rules."""
    function = find_decomposition(op)
    outputs = [_run(implementation, args, kwargs) for implementation in (op, function)]
    torch.testing.assert_close(outputs[1], outputs[0], equal_nan=True)
    tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]

    def call(*inputs: torch.Tensor) -> Any:
        remaining = iter(inputs)
        filled = [
            next(remaining) if isinstance(argument, torch.Tensor) else argument for argument in args
        ]
        return function(*filled, **kwargs)

    traced = make_fx(call, pre_dispatch=True)(*tensors).graph
    ops = {node.target for node in traced.nodes if node.op == "call_function"}
    unruled = [target for target in ops if find_rule(target) is None and target not in _NOT_SHARDED]
    assert unruled == [], f"{op} is taken apart into ops without rules: {unruled}"


_NOT_SHARDED = (
    operator.getitem,
    torch.ops.aten.arange.default,
    torch.ops.aten.full.default,
    torch.ops.aten.ones.default,
    torch.ops.aten.zeros.default,
)


def _run(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results, and gradients for a random weight of each result."""
    torch.manual_seed(0)
    leaves = [_leaf(argument) for argument in args]
    results = function(*leaves, **kwargs)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    torch.manual_seed(1)
    loss = sum(
        (result * torch.randn_like(result)).sum() for result in results if result.requires_grad
    )
    wanted = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not wanted:
        return [result.detach() for result in results], []
    return [result.detach() for result in results], list(torch.autograd.grad(loss, wanted))


def _leaf(value: Any) -> Any:
    """A copy of a tensor as a leaf that requires a gradient if the tensor does."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def trainable(*shape: int) -> torch.Tensor:
    return numbers(*shape).requires_grad_()


def stable_id(value: object) -> str:
    """A test's id that is the same in every process; the order of a set is not."""
    return str(sorted(value)) if isinstance(value, set) else str(value)
