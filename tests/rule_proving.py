"""What tests of rules share: tensors to try, and all that a rule claims, proved."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from shardscope.parallel.placements import Placement
from shardscope.parallel.rules.lookup import find_decomposition, find_rule
from shardscope.parallel.rules.proof import prove

__all__ = ["claims", "learned", "numbers", "plain", "positives", "take_apart"]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


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


def spell(strategies: Sequence[Any]) -> str:
    """`S(0) R -> S(0)`, with a `;` between mesh axes."""
    return "; ".join(
        f"{' '.join(map(str, one.inputs))} -> {' '.join(map(str, one.outputs))}"
        for one in strategies
    )


def plain(found: set[str]) -> set[str]:
    """Without cuts in blocks."""
    return {one for one in found if ", " not in one}


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
