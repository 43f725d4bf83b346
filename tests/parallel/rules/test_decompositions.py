"""Decompositions give the ops' values and gradients, and need no gather."""

from __future__ import annotations

from inspect import signature
from math import inf
from typing import Any

import pytest
import torch

from rule_proving import numbers, propagate_shards, stable_id
from shardscope.parallel.sharding_rules.registry import (
    DECOMPOSITIONS,
    find_decomposition,
    load_rules,
)
from shardscope.plan.placements import Partial, Placement, Replicate, Shard

aten = torch.ops.aten
R = Replicate()
load_rules()


def outputs_of(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def gradient(result: torch.Tensor, weight: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Zero for a result that counts, and so has none."""
    if not result.requires_grad:
        return torch.zeros_like(tensor)
    (input_gradient,) = torch.autograd.grad(
        (result * weight).sum(),
        tensor,
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    return input_gradient


CASES: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.softmax.int, (-1,), {}),
    (aten.softmax.int, (1, torch.float32), {}),
    (aten.log_softmax.int, (-1,), {}),
    (aten.special_softmax.default, (-1,), {}),
    (aten.special_log_softmax.default, (-1,), {"dtype": torch.float64}),
    (aten._softmax.default, (-1, False), {}),
    (aten._log_softmax.default, (-1, False), {}),
    (aten._safe_softmax.default, (-1,), {}),
    (aten.logsumexp.default, ([-1],), {}),
    (aten.logsumexp.default, ([0, 1], True), {}),
    (aten.var.default, (False,), {}),
    (aten.var.dim, ([-1],), {}),
    (aten.var.correction, ([1],), {"correction": 0, "keepdim": True}),
    (aten.var.correction, (), {}),
    (aten.std.default, (), {}),
    (aten.std.dim, ([-1], False, True), {}),
    (aten.std.correction, ([1],), {"correction": 2}),
    (aten.var_mean.correction, ([1],), {}),
    (aten.var_mean.default, (), {}),
    (aten.std_mean.dim, ([1],), {}),
    (aten.linalg_vector_norm.default, (), {}),
    *((aten.linalg_vector_norm.default, (order, [-1], True), {}) for order in (1, 2, 3, inf, -inf)),
    (aten.linalg_vector_norm.default, (0, [-1]), {"dtype": torch.float64}),
    (aten.norm.Scalar, (), {}),
    (aten.norm.ScalarOpt_dim, (None, [1]), {}),
    (aten.norm.ScalarOpt_dtype, (2,), {"dtype": torch.float64}),
    (aten.norm.ScalarOpt_dim_dtype, (1, [1], True), {"dtype": torch.float64}),
    (aten.frobenius_norm.dim, ([1],), {}),
    *((getattr(aten, name).default, ([0, -1], True), {}) for name in ("amax", "amin")),
    *((getattr(aten, name).default, (), {}) for name in ("amax", "max", "min")),
    *((getattr(aten, name).dim, (-1,), {}) for name in ("max", "min")),
    (aten.max.dim, (0, True), {}),
    *((getattr(aten, name).default, (-1, True), {}) for name in ("argmax", "argmin")),
    *((aten.argmax.default, args, {}) for args in ((), (None, True), (0,))),
    (aten.layer_norm.default, ([6],), {}),
    (aten.native_layer_norm.default, ([6], numbers(6), numbers(6), 1e-5), {}),
    (aten.rms_norm.default, ([6],), {}),
    (aten.rms_norm.default, ([6], numbers(6), 1e-3), {}),
    (aten._fused_rms_norm.default, ([6], numbers(6), None), {}),
]


@pytest.mark.filterwarnings("ignore:at..frobenius_norm is deprecated")  # since torch 2.15
@pytest.mark.parametrize(("op", "args", "kwargs"), CASES, ids=stable_id)
def test_decompositions_give_the_ops_values_and_gradients(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    tensor = numbers(4, 6).requires_grad_()
    apart = outputs_of(find_decomposition(op)(tensor, *args, **kwargs))
    expected = outputs_of(op(tensor, *args, **kwargs))
    torch.testing.assert_close(apart, expected)
    for result, reference in zip(apart, expected, strict=True):
        if reference.requires_grad and reference.is_floating_point():
            weight = torch.randn_like(reference)
            known = gradient(reference, weight, tensor)
            torch.testing.assert_close(gradient(result, weight, tensor), known)


@pytest.mark.parametrize("op", sorted(DECOMPOSITIONS, key=str), ids=stable_id)
def test_decompositions_have_the_parameter_names_of_the_op(op: Any) -> None:
    names = [slot.name for slot in op._schema.arguments]
    signature(find_decomposition(op)).bind(**dict.fromkeys(names))
    in_order = [slot.name for slot in op._schema.arguments if not slot.kwarg_only]
    signature(find_decomposition(op)).bind(*in_order, **dict.fromkeys(names[len(in_order) :]))


OF_ANY_DTYPE = [
    case
    for case in CASES
    if "dtype" not in case[2] and not any(argument is torch.float32 for argument in case[1])
]


@pytest.mark.parametrize(("op", "args", "kwargs"), OF_ANY_DTYPE, ids=stable_id)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=stable_id)
def test_decompositions_have_the_ops_dtypes_in_half_precision(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> None:
    halves = [result.to(dtype) if isinstance(result, torch.Tensor) else result for result in args]
    tensor = numbers(4, 6).to(dtype)
    apart = outputs_of(find_decomposition(op)(tensor, *halves, **kwargs))
    expected = outputs_of(op(tensor, *halves, **kwargs))
    step = 2 * torch.finfo(dtype).eps  # parts may round once more
    for argument, reference in zip(apart, expected, strict=True):
        torch.testing.assert_close(argument, reference, rtol=step, atol=step)


@pytest.mark.parametrize("op", [aten.linalg_vector_norm.default, aten.std.default], ids=stable_id)
def test_the_gradient_at_zero_is_zero_and_not_nan(op: Any) -> None:
    tensor = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    (input_gradient,) = torch.autograd.grad(find_decomposition(op)(tensor), tensor)
    torch.testing.assert_close(input_gradient, torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize(
    "op",
    [aten.softmax.int, aten.log_softmax.int, aten.logsumexp.default, aten._safe_softmax.default],
)
def test_masked_rows_are_as_torch_has_them(op: Any) -> None:
    tensor = numbers(4, 6)
    tensor[0], tensor[1, :3], tensor[2] = -inf, -inf, 1000.0
    dim: Any = [-1] if op is aten.logsumexp.default else -1
    apart = find_decomposition(op)(tensor, dim)
    torch.testing.assert_close(apart, op(tensor, dim), equal_nan=True)


@pytest.mark.parametrize("name", ["max", "min"])
def test_argmax_returns_the_first_maximum_and_all_maxima_share_the_gradient(name: str) -> None:
    tensor = torch.tensor([[1.0, 3.0, 3.0, -2.0, -2.0], [torch.nan, 1.0, 2.0, torch.nan, 0.0]])
    packet, index = getattr(aten, name), getattr(aten, f"arg{name}").default
    for op in (packet.dim, index):
        torch.testing.assert_close(
            find_decomposition(op)(tensor, 1), op(tensor, 1), equal_nan=True, check_dtype=True
        )
    row = tensor[0].clone().requires_grad_()
    ones = torch.ones(())
    along = getattr(aten, f"a{name}").default
    known = gradient(along(row, [0]), ones, row)
    torch.testing.assert_close(gradient(find_decomposition(along)(row, [0]), ones, row), known)


@pytest.mark.parametrize(
    ("op", "args", "needed", "result"),
    [
        (aten.softmax.int, (-1,), ["P(max)", "P"], Shard(1)),
        (aten.log_softmax.int, (-1,), ["P(max)", "P"], Shard(1)),
        (aten._safe_softmax.default, (-1,), ["P(min)", "P(max)", "P"], Shard(1)),
        (aten.logsumexp.default, ([-1],), ["P(max)", "P"], R),
        (aten.var.correction, ([-1],), ["P"], Partial()),
        (aten.std.correction, ([-1],), ["P", "P"], R),
        (aten.linalg_vector_norm.default, (2, [-1]), ["P"], R),
        (aten.layer_norm.default, ([6],), ["P", "P"], Shard(1)),
        (aten.rms_norm.default, ([6],), ["P"], Shard(1)),
        (aten.amax.default, ([-1],), ["P(max)", "P", "P"], R),
        (aten.argmax.default, (-1,), ["P(max)"], Partial("min")),
        (aten.max.dim, (-1,), ["P(max)", "P(min)"], Partial()),
    ],
    ids=stable_id,
)
def test_decompositions_along_a_sharded_dim_gather_nothing(
    op: Any, args: tuple[Any, ...], needed: list[str], result: Placement
) -> None:
    apart = find_decomposition(op)
    reduced, placement = propagate_shards(
        lambda tensor: apart(tensor, *args), [numbers(4, 6)], [Shard(1)]
    )
    assert (reduced, placement) == (needed, result)


def test_a_norms_weights_are_sharded_with_its_features() -> None:
    apart = find_decomposition(aten.layer_norm.default)
    reduced, placement = propagate_shards(
        lambda tensor, weight, bias: apart(tensor, [6], weight, bias),
        [numbers(4, 6), numbers(6), numbers(6)],
        [Shard(1), Shard(0), Shard(0)],
    )
    assert (reduced, placement) == (["P", "P"], Shard(1))


def test_rowwise_weights_give_partial_sums_that_are_reduced_before_the_bias() -> None:
    apart = find_decomposition(aten.linear.default)
    tensors = [numbers(4, 6), numbers(8, 6), numbers(8)]
    reduced, placement = propagate_shards(apart, tensors, [Shard(1), Shard(1), R])
    assert (reduced, placement) == (["P"], R)
