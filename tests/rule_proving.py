"""What tests of rules share: tensors to try, and all that a rule claims, proved."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from rule_offers import find_strategies
from rule_proof import prove
from rule_sample import make_sample
from shardscope.parallel.placements import Partial, Placement, Replicate, Shard
from shardscope.parallel.rules.lookup import find_decomposition, find_rule

__all__ = [
    "claims",
    "cut_through",
    "learned",
    "numbers",
    "plain",
    "positives",
    "spell",
    "take_apart",
]


_CHANCE = torch.Generator().manual_seed(0)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_CHANCE)


def positives(*shape: int) -> torch.Tensor:
    return numbers(*shape).abs() + 0.1


def claims(
    op: Any,
    *args: Any,
    sizes: Sequence[int] = (2,),
    offers: Sequence[Sequence[Placement]] = (),
    kwargs: Mapping[str, Any] | None = None,
    constants: Collection[str] = (),
) -> set[str]:
    """Every strategy that the op's rule claims, as text, after all of them were proved."""
    verdicts = prove(op, args, kwargs, sizes=sizes, offers=offers, constants=constants)
    refuted = {spell(one.strategies): one.refutation for one in verdicts if one.refutation}
    assert refuted == {}, f"{op} cannot run as its rule says: {refuted}"
    return {spell(one.strategies) for one in verdicts}


def plain(found: set[str]) -> set[str]:
    """Without cuts in blocks."""
    return {one for one in found if re.search(r"\dx\)|, \(", one) is None}


def spell(strategies: Sequence[Any]) -> str:
    """`S(0) R -> S(0)`, with a `;` between mesh axes."""
    return "; ".join(
        f"{' '.join(map(str, one.inputs))} -> {' '.join(map(str, one.outputs))}"
        for one in strategies
    )


def cut_through(
    function: Callable[..., Any], tensors: Sequence[torch.Tensor], cuts: Sequence[Placement]
) -> tuple[list[str], Placement]:
    """Which sums and maxima a function needs when its tensors are cut so, and how its result lies.

    Fails where a piece would have to be gathered: no op of it may need that.
    """
    graph = make_fx(function, pre_dispatch=True)(*tensors).graph
    values: dict[Any, Any] = {}
    lies: dict[Any, Placement] = {}
    free: set[Any] = set()  # not reached by gradients
    reduced: list[str] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            lies[node], values[node] = cuts[len(values)], tensors[len(values)]
        elif node.op == "call_function" and node.target is not operator.getitem:
            args = torch.fx.map_arg(node.args, values.__getitem__)
            sample = make_sample(node.target, args, torch.fx.map_arg(node.kwargs, values.get))
            values[node], taken = sample.outputs[0], node.all_input_nodes
            if node.target is torch.ops.aten.detach.default or (taken and free >= set(taken)):
                free.add(node)
            call = sample.as_call(num_ranks=2, is_training=node not in free)
            given = [one for one in node.args if isinstance(one, torch.fx.Node)]
            lies[node] = _choose(call, given, lies, reduced)
        elif node.op == "output":
            first = node.args[0][0] if isinstance(node.args[0], tuple | list) else node.args[0]
            return reduced, lies[first]
    raise AssertionError("a graph without an output")


def _choose(
    call: Any, given: list[Any], lies: dict[Any, Placement], reduced: list[str]
) -> Placement:
    """The result's placement where every piece stays one; addends may be summed first, once."""
    for is_summed in (False, True):
        if is_summed:
            for node in given:
                if isinstance(lies[node], Partial):
                    reduced.append(str(lies[node]))
                    lies[node] = Replicate()
        wanted = [lies[node] for node in given]
        if all(isinstance(one, Replicate) for one in wanted):
            return Replicate()
        listed = find_strategies(call)
        # What is whole may be cut: that moves nothing.
        fitting = [one for one in listed if list(one.inputs) == wanted] or [
            one
            for one in listed
            if all(
                a == b or (a == Replicate() and isinstance(b, Shard))
                for a, b in zip(wanted, one.inputs, strict=True)
            )
        ]
        if fitting:
            return fitting[0].outputs[0]
    raise AssertionError(f"{call.op} would have to gather {[str(lies[one]) for one in given]}")


def take_apart(op: Any, *args: Any, **kwargs: Any) -> None:
    """Prove an op's decomposition: the same results and gradients, of ops that can be cut."""
    function = find_decomposition(op)
    outputs = [_run(one, args, kwargs) for one in (op, function)]
    torch.testing.assert_close(outputs[1], outputs[0], equal_nan=True)
    tensors = [one for one in args if isinstance(one, torch.Tensor)]

    def call(*given: torch.Tensor) -> Any:
        left = iter(given)
        filled = [next(left) if isinstance(one, torch.Tensor) else one for one in args]
        return function(*filled, **kwargs)

    traced = make_fx(call, pre_dispatch=True)(*tensors).graph
    ops = {node.target for node in traced.nodes if node.op == "call_function"}
    unruled = [one for one in ops if find_rule(one) is None and one not in _NOT_CUT]
    assert unruled == [], f"{op} is taken apart into ops without rules: {unruled}"


_NOT_CUT = (
    operator.getitem,
    torch.ops.aten.arange.default,
    torch.ops.aten.full.default,
    torch.ops.aten.ones.default,
    torch.ops.aten.zeros.default,
)


def _run(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results, and gradients for one random weight of each result."""
    torch.manual_seed(0)
    leaves = [_leaf(one) for one in args]
    results = function(*leaves, **kwargs)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    torch.manual_seed(1)
    loss = sum((one * torch.randn_like(one)).sum() for one in results if one.requires_grad)
    wanted = [one for one in leaves if isinstance(one, torch.Tensor) and one.requires_grad]
    if not wanted:
        return [one.detach() for one in results], []
    return [one.detach() for one in results], list(torch.autograd.grad(loss, wanted))


def _leaf(value: Any) -> Any:
    """Arguments that require gradients are to have them."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def learned(*shape: int) -> torch.Tensor:
    return numbers(*shape).requires_grad_()


def spelled(value: object) -> str:
    """A test's id: the same in every process, which a set's order is not."""
    return str(sorted(value)) if isinstance(value, set) else str(value)
