"""Recurrent layers are sharded along the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rule_proving import numbers, prove_strategies, stable_id, without_blocks

aten = torch.ops.aten


def weights(num_gates: int) -> list[torch.Tensor]:
    rows = num_gates * 3
    return [numbers(rows, 5), numbers(rows, 3), numbers(rows), numbers(rows)]


@pytest.mark.parametrize(
    ("op", "num_gates"),
    [(aten.gru.input, 3), (aten.rnn_tanh.input, 1), (aten.rnn_relu.input, 1)],
    ids=stable_id,
)
@pytest.mark.parametrize("batch_first", [True, False])
def test_the_batch_dim_is_sharded_wherever_it_is(
    op: Any, num_gates: int, batch_first: bool
) -> None:
    shape = (4, 2, 5) if batch_first else (2, 4, 5)
    state = numbers(1, 4, 3)
    rest = (True, 1, 0.0, True, False, batch_first)
    strategies = prove_strategies(op, numbers(*shape), state, weights(num_gates), *rest, sizes=[2])
    batch = 0 if batch_first else 1
    assert without_blocks(strategies) == {f"S({batch}) S(1) R R R R -> S({batch}) S(1)"}


def test_both_states_of_an_lstm_are_sharded() -> None:
    states = [numbers(1, 4, 3), numbers(1, 4, 3)]
    args = (numbers(4, 2, 5), states, weights(4), True, 1, 0.0, True, False, True)
    for num_ranks in (2, 4):
        strategies = prove_strategies(aten.lstm.input, *args, sizes=[num_ranks])
        assert without_blocks(strategies) == {"S(0) S(1) S(1) R R R R -> S(0) S(1) S(1)"}


def test_dropout_between_layers_is_drawn_for_the_full_batch() -> None:
    deeper = [*weights(3), numbers(9, 3), *weights(3)[1:]]
    states = numbers(2, 4, 3)
    args = (numbers(4, 2, 5), states, deeper, True, 2)
    assert prove_strategies(aten.gru.input, *args, 0.5, True, False, True) == set()
    assert prove_strategies(aten.gru.input, *args, 0.5, False, False, True) != set()
