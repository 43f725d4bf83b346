"""Attention is sharded along the batch, the heads (in complete groups) or the queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import decompose, numbers, prove_strategies, trainable, without_blocks
from shardscope.parallel.sharding_rules.registry import find_decomposition

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default
FOR_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default


def heads(*shape: int) -> list[torch.Tensor]:
    return [numbers(*shape), numbers(*shape), numbers(*shape)]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_attention_is_sharded_by_batch_heads_and_queries(num_ranks: int) -> None:
    strategies = prove_strategies(SDPA, *heads(3, 6, 5, 4), sizes=[num_ranks])
    assert without_blocks(strategies) == {
        *("S(0) S(0) S(0) -> S(0)", "S(1) S(1) S(1) -> S(1)", "S(2) R R -> S(2)"),
    }


def test_causal_attention_does_not_shard_queries() -> None:
    strategies = prove_strategies(SDPA, *heads(4, 4, 6, 4), None, 0.0, True)
    assert without_blocks(strategies) == {"S(0) S(0) S(0) -> S(0)", "S(1) S(1) S(1) -> S(1)"}


def test_no_rank_is_left_without_heads() -> None:
    assert "S(1) S(1) S(1) -> S(1)" not in prove_strategies(SDPA, *heads(3, 4, 5, 4), sizes=[3])


@pytest.mark.parametrize("shape", [(4, 5, 4), (2, 2, 4, 5, 4)])
def test_any_number_of_dims_before_the_queries(shape: tuple[int, ...]) -> None:
    strategies = prove_strategies(SDPA, *heads(*shape))
    for dim in range(len(shape) - 2):
        assert f"S({dim}) S({dim}) S({dim}) -> S({dim})" in strategies


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ((6, 5), {"S(1) S(1) S(1) R -> S(1)", "S(2) R R S(0) -> S(2)"}),
        ((4, 6, 5), {"S(0) S(0) S(0) R -> S(0)", "S(1) S(1) S(1) S(0) -> S(1)"}),
        ((3, 1, 1, 5), {"S(0) S(0) S(0) S(0) -> S(0)", "S(2) R R R -> S(2)"}),
        ((3, 4, 6, 5), {"S(1) S(1) S(1) S(1) -> S(1)", "S(2) R R S(2) -> S(2)"}),
    ],
)
def test_a_mask_is_sharded_where_it_is_not_broadcast(
    mask: tuple[int, ...], expected: set[str]
) -> None:
    query, key, value = numbers(3, 4, 6, 4), numbers(3, 4, 5, 4), numbers(3, 4, 5, 4)
    assert expected <= prove_strategies(SDPA, query, key, value, numbers(*mask))
    assert expected <= prove_strategies(SDPA, query, key, value, numbers(*mask) > -1)


def test_heads_that_share_keys_are_sharded_in_complete_groups() -> None:
    grouped = {"enable_gqa": True}
    query, shared = numbers(2, 8, 5, 4), (numbers(2, 4, 5, 4), numbers(2, 4, 5, 4))
    assert "S(1) S(1) S(1) -> S(1)" in prove_strategies(SDPA, query, *shared, kwargs=grouped)
    assert "S(1) S(1) S(1) -> S(1); S(1) S(1) S(1) -> S(1)" in prove_strategies(
        SDPA, query, *shared, kwargs=grouped, sizes=[2, 2]
    )
    strategies = prove_strategies(SDPA, query, *shared, kwargs=grouped, sizes=[3])
    assert not any(strategy.endswith("-> S(1)") for strategy in strategies)


def test_a_single_key_head_is_replicated() -> None:
    strategies = prove_strategies(
        SDPA, numbers(2, 4, 5, 4), *heads(2, 1, 5, 4)[:2], kwargs={"enable_gqa": True}
    )
    assert "S(1) R R -> S(1)" in strategies


def test_shared_heads_that_are_too_few_are_repeated() -> None:
    query, shared = trainable(2, 8, 5, 4), (trainable(2, 2, 5, 4), trainable(2, 2, 5, 4))
    decompose(SDPA, query, *shared, None, 0.0, True, enable_gqa=True, scale=0.3)
    repeated = find_decomposition(SDPA)(query, *shared, enable_gqa=True)
    torch.testing.assert_close(repeated, SDPA(query, *shared, enable_gqa=True))


def test_attention_without_shared_heads_or_dropout_is_not_decomposed() -> None:
    with pytest.raises(NotImplementedError):
        find_decomposition(SDPA)(*heads(2, 4, 5, 4))


def test_attention_with_dropout_has_no_strategies() -> None:
    assert prove_strategies(SDPA, *heads(4, 4, 6, 4), None, 0.5) == set()


MASKED = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])


@pytest.mark.parametrize(
    ("mask", "is_causal", "settings"),
    [
        (None, False, {}),
        (None, True, {"scale": 0.2}),
        (MASKED, False, {}),
        (torch.zeros(3, 3).masked_fill(~MASKED, -torch.inf).double(), False, {}),
        (numbers(3, 3), False, {}),
    ],
)
@pytest.mark.parametrize("num_shared", [4, 2])
def test_with_dropout_the_steps_of_the_cpu_draw_what_it_draws(
    mask: torch.Tensor | None, is_causal: bool, settings: dict[str, Any], num_shared: int
) -> None:
    query, key, value = (
        trainable(2, 4, 3, 4),
        trainable(2, num_shared, 3, 4),
        numbers(2, num_shared, 3, 4),
    )
    settings = {**settings, "enable_gqa": num_shared != 4}
    decompose(SDPA, query, key, value, mask, 0.5, is_causal, **settings)


def test_half_precision_is_widened_as_the_cpu_widens_it() -> None:
    inputs = [tensor.bfloat16() for tensor in heads(2, 4, 3, 4)]
    decompose(SDPA, *inputs, None, 0.5, True)


def test_fused_kernels_shard_every_output_that_has_heads() -> None:
    strategies = prove_strategies(FOR_CPU, *heads(4, 4, 6, 4), 0.0, True)
    assert without_blocks(strategies) == {
        "S(0) S(0) S(0) -> S(0) S(0)",
        "S(1) S(1) S(1) -> S(1) S(1)",
    }
    masked = {"attn_mask": numbers(4, 1, 6, 6)}
    strategies = prove_strategies(
        FOR_CPU, *heads(4, 4, 6, 4), kwargs=masked, constants=["attn_mask"]
    )
    assert without_blocks(strategies) == {
        *("S(0) S(0) S(0) S(0) -> S(0) S(0)", "S(1) S(1) S(1) R -> S(1) S(1)"),
    }
