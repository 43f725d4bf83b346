"""Attention runs on pieces of the batch, of the heads or of the queries, and groups stay whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import claims, learned, numbers, plain, take_apart
from shardscope.parallel.rules.lookup import find_decomposition

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default
FOR_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default


def heads(*shape: int) -> list[torch.Tensor]:
    return [numbers(*shape), numbers(*shape), numbers(*shape)]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_it_is_cut_by_batch_heads_and_queries(num_ranks: int) -> None:
    found = claims(SDPA, *heads(3, 6, 5, 4), sizes=[num_ranks])
    assert plain(found) == {
        *("S(0) S(0) S(0) -> S(0)", "S(1) S(1) S(1) -> S(1)", "S(2) R R -> S(2)"),
    }


def test_causal_attention_has_to_know_its_queries_so_they_stay() -> None:
    found = claims(SDPA, *heads(4, 4, 6, 4), None, 0.0, True)
    assert plain(found) == {"S(0) S(0) S(0) -> S(0)", "S(1) S(1) S(1) -> S(1)"}


def test_no_rank_is_left_without_heads() -> None:
    assert "S(1) S(1) S(1) -> S(1)" not in claims(SDPA, *heads(3, 4, 5, 4), sizes=[3])


@pytest.mark.parametrize("shape", [(4, 5, 4), (2, 2, 4, 5, 4)])
def test_any_number_of_dims_before_the_queries(shape: tuple[int, ...]) -> None:
    found = claims(SDPA, *heads(*shape))
    for dim in range(len(shape) - 2):
        assert f"S({dim}) S({dim}) S({dim}) -> S({dim})" in found


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ((6, 5), {"S(1) S(1) S(1) R -> S(1)", "S(2) R R S(0) -> S(2)"}),
        ((4, 6, 5), {"S(0) S(0) S(0) R -> S(0)", "S(1) S(1) S(1) S(0) -> S(1)"}),
        ((3, 1, 1, 5), {"S(0) S(0) S(0) S(0) -> S(0)", "S(2) R R R -> S(2)"}),
        ((3, 4, 6, 5), {"S(1) S(1) S(1) S(1) -> S(1)", "S(2) R R S(2) -> S(2)"}),
    ],
)
def test_a_mask_is_cut_where_it_is_not_broadcast(mask: tuple[int, ...], expected: set[str]) -> None:
    query, key, value = numbers(3, 4, 6, 4), numbers(3, 4, 5, 4), numbers(3, 4, 5, 4)
    assert expected <= claims(SDPA, query, key, value, numbers(*mask))
    assert expected <= claims(SDPA, query, key, value, numbers(*mask) > -1)


def test_heads_that_share_keys_are_cut_in_whole_groups() -> None:
    grouped = {"enable_gqa": True}
    query, shared = numbers(2, 8, 5, 4), (numbers(2, 4, 5, 4), numbers(2, 4, 5, 4))
    assert "S(1) S(1) S(1) -> S(1)" in claims(SDPA, query, *shared, kwargs=grouped)
    assert "S(1) S(1) S(1) -> S(1); S(1) S(1) S(1) -> S(1)" in claims(
        SDPA, query, *shared, kwargs=grouped, sizes=[2, 2]
    )
    found = claims(SDPA, query, *shared, kwargs=grouped, sizes=[3])
    assert not any(one.endswith("-> S(1)") for one in found)


def test_one_head_of_keys_serves_every_rank() -> None:
    found = claims(SDPA, numbers(2, 4, 5, 4), *heads(2, 1, 5, 4)[:2], kwargs={"enable_gqa": True})
    assert "S(1) R R -> S(1)" in found


def test_shared_heads_that_are_too_few_are_repeated() -> None:
    query, shared = learned(2, 8, 5, 4), (learned(2, 2, 5, 4), learned(2, 2, 5, 4))
    take_apart(SDPA, query, *shared, None, 0.0, True, enable_gqa=True, scale=0.3)
    repeated = find_decomposition(SDPA)(query, *shared, enable_gqa=True)
    torch.testing.assert_close(repeated, SDPA(query, *shared, enable_gqa=True))


def test_without_shared_heads_or_dropout_there_is_nothing_to_take_apart() -> None:
    with pytest.raises(NotImplementedError):
        find_decomposition(SDPA)(*heads(2, 4, 5, 4))


def test_random_masks_are_drawn_for_the_whole_so_with_dropout_nothing_is_cut() -> None:
    assert claims(SDPA, *heads(4, 4, 6, 4), None, 0.5) == set()


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
        learned(2, 4, 3, 4),
        learned(2, num_shared, 3, 4),
        numbers(2, num_shared, 3, 4),
    )
    settings = {**settings, "enable_gqa": num_shared != 4}
    take_apart(SDPA, query, key, value, mask, 0.5, is_causal, **settings)


def test_half_precision_is_widened_as_the_cpu_widens_it() -> None:
    inputs = [one.bfloat16() for one in heads(2, 4, 3, 4)]
    take_apart(SDPA, *inputs, None, 0.5, True)


def test_kernels_that_return_more_are_cut_in_all_that_has_heads() -> None:
    found = claims(FOR_CPU, *heads(4, 4, 6, 4), 0.0, True)
    assert plain(found) == {"S(0) S(0) S(0) -> S(0) S(0)", "S(1) S(1) S(1) -> S(1) S(1)"}
    masked = {"attn_mask": numbers(4, 1, 6, 6)}
    found = claims(FOR_CPU, *heads(4, 4, 6, 4), kwargs=masked, constants=["attn_mask"])
    assert plain(found) == {
        *("S(0) S(0) S(0) S(0) -> S(0) S(0)", "S(1) S(1) S(1) R -> S(1) S(1)"),
    }
