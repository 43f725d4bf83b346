"""Pointwise ops run on pieces along any dim; linear ones keep addends, others never do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import claims, numbers, positives, spelled
from shardscope.parallel.rules.pointwise import is_pointwise

aten = torch.ops.aten


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    "op",
    [
        *(aten.relu.default, aten.gelu.default, aten.silu.default, aten.exp.default),
        *(aten.absolute.default, aten.hardswish.default, aten.log_sigmoid.default),
    ],
    ids=spelled,
)
def test_an_op_of_one_tensor_is_cut_along_every_dim_and_keeps_no_addends(
    op: Any, num_ranks: int
) -> None:
    found = claims(op, numbers(4, 6, 5), sizes=[num_ranks])
    assert {"S(0) -> S(0)", "S(1) -> S(1)", "S(2) -> S(2)"} <= found
    assert not any("P" in one for one in found)


def test_what_is_broadcast_along_a_dim_stays_whole() -> None:
    found = claims(aten.mul.Tensor, numbers(4, 1, 6), numbers(5, 1))
    assert found >= {"S(0) R -> S(0)", "R S(0) -> S(1)", "S(2) R -> S(2)", "P R -> P", "R P -> P"}
    assert not any("; " in one or "S(1) " in one for one in found)


def test_a_tensor_without_dims_stays_whole() -> None:
    found = claims(aten.add.Tensor, numbers(4), numbers())
    assert found == {"S(0) R -> S(0)", "P P -> P", "S(0, 2x) R -> S(0, 2x)"}


@pytest.mark.parametrize(
    ("op", "args", "expected"),
    [
        (aten.add.Tensor, (numbers(4), numbers(4)), {"P P -> P"}),
        (aten.add.Tensor, (numbers(4), 2.0), set()),
        (aten.add.Scalar, (numbers(4), 2.0), set()),
        (aten.sub.Tensor, (numbers(4), numbers(4)), {"P P -> P"}),
        (aten.rsub.Scalar, (numbers(4), 1), set()),
        (aten.rsub.Tensor, (numbers(4), numbers(4)), {"P P -> P"}),
        (aten.mul.Tensor, (numbers(4), numbers(4)), {"P R -> P", "R P -> P"}),
        (aten.mul.Tensor, (numbers(4), 3), {"P -> P"}),
        (aten.div.Tensor, (numbers(4), positives(4)), {"P R -> P"}),
        (aten.div.Scalar, (numbers(4), 3), {"P -> P"}),
        (aten.div.Tensor_mode, (numbers(4), positives(4)), {"P R -> P"}),
        (aten.neg.default, (numbers(4),), {"P -> P"}),
        (aten.where.self, (numbers(4) > 0, numbers(4), numbers(4)), {"R P P -> P"}),
        (aten.where.ScalarOther, (numbers(4) > 0, numbers(4), 0.0), {"R P -> P"}),
        (aten.where.ScalarOther, (numbers(4) > 0, numbers(4), 1.0), set()),
        (aten.where.ScalarSelf, (numbers(4) > 0, 0, numbers(4)), {"R P -> P"}),
        (aten.where.Scalar, (numbers(4) > 0, 0, 0), set()),
        (aten.masked_fill.Scalar, (numbers(4), numbers(4) > 0, 0), {"P R -> P"}),
        (aten.masked_fill.Scalar, (numbers(4), numbers(4) > 0, -1e9), set()),
        (aten.masked_fill.Tensor, (numbers(4), numbers(4) > 0, numbers()), {"P R P -> P"}),
        (aten.maximum.default, (numbers(4), numbers(4)), set()),
        (aten.pow.Tensor_Scalar, (positives(4), 2), set()),
        (aten.complex.default, (numbers(4), numbers(4)), {"P P -> P"}),
        (aten.polar.default, (positives(4), numbers(4)), set()),
        (aten.div.Tensor_mode, (numbers(4), positives(4), "floor"), set()),
    ],
    ids=lambda one: "" if isinstance(one, tuple) else spelled(one),
)
def test_addends_stay_addends_exactly_where_the_op_is_linear(
    op: Any, args: tuple[Any, ...], expected: set[str]
) -> None:
    kwargs = {}
    if op is aten.div.Tensor_mode:
        kwargs, args = {"rounding_mode": args[2] if len(args) > 2 else None}, args[:2]
    found = claims(op, *args, kwargs=kwargs)
    assert {one for one in found if "P" in one} == expected
    assert any("S(0)" in one for one in found)


def test_a_weight_for_each_channel_is_cut_with_the_channels() -> None:
    found = claims(aten.prelu.default, numbers(2, 4, 6), numbers(4))
    assert {"S(0) R -> S(0)", "S(1) S(0) -> S(1)", "S(2) R -> S(2)"} <= found
    one_for_all = claims(aten.prelu.default, numbers(2, 4), numbers(1))
    assert {"S(0) R -> S(0)", "S(1) R -> S(1)"} <= one_for_all


def test_an_op_with_two_results_gives_both_in_pieces() -> None:
    assert "S(1) -> S(1) S(1)" in claims(aten.frexp.Tensor, numbers(4, 6))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_uneven_pieces_are_proved_too(num_ranks: int) -> None:
    assert "S(0) S(0) -> S(0)" in claims(
        aten.mul.Tensor, numbers(5, 2), numbers(5, 2), sizes=[num_ranks]
    )


def test_two_axes_may_cut_one_dim_or_two() -> None:
    found = claims(aten.add.Tensor, numbers(4, 6), numbers(6), sizes=[2, 2])
    assert "S(1) S(0) -> S(1); S(1, 3x) S(0, 3x) -> S(1, 3x)" not in found
    assert "S(0) R -> S(0); S(1) S(0) -> S(1)" in found
    assert "S(0) R -> S(0); S(0) R -> S(0)" in found
    assert "P P -> P; S(1) S(0) -> S(1)" in found


@pytest.mark.parametrize(
    "op",
    [
        *(aten.bernoulli.default, aten.where.default, aten.relu_.default),
        *(aten.rand_like.default, aten.equal.default),
    ],
    ids=spelled,
)
def test_ops_that_draw_or_write_or_look_elsewhere_are_not_pointwise(op: Any) -> None:
    assert not is_pointwise(op)


def ops_that_torch_marks() -> list[Any]:
    packets = [getattr(aten, name) for name in dir(aten)]
    named = [one for one in packets if hasattr(one, "overloads")]
    ops = [getattr(one, kind) for one in named for kind in one.overloads()]
    return [op for op in ops if is_pointwise(op)]


def arguments_of(op: Any) -> dict[str, Any]:
    """Something to try an op with: tensors that broadcast, of numbers that most functions take."""
    shapes = iter([(2, 4), (4,), (1, 4), ()])
    arguments: dict[str, Any] = {}
    for slot in op._schema.arguments:
        if "Tensor" in str(slot.type):
            tensor = torch.rand(next(shapes), dtype=torch.float64) * 0.8 + 0.1
            is_mask = slot.name in ("mask", "condition")
            arguments[slot.name] = tensor > 0.5 if is_mask else tensor
        elif not slot.has_default_value():
            arguments[slot.name] = {"int": 2, "bool": True, "number": 0.5}.get(str(slot.type))
    return arguments


def test_every_op_that_torch_marks_as_pointwise_is() -> None:
    num_proved = 0
    for op in ops_that_torch_marks():
        arguments = arguments_of(op)
        try:
            op(**arguments)
        except (RuntimeError, TypeError, NotImplementedError):
            continue  # it wants integers, or more arguments
        claims(op, kwargs=arguments)
        num_proved += 1
    assert num_proved > 150
