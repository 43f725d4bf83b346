"""What scripts are made of sees what it should, tried without a script."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compile_backends import subgraph, wrong_backward
from shardscope.compile.diagnose.worker.harness import find_unrest, find_wrong_numbers


def double(x: Tensor) -> tuple[Tensor]:
    return (x.sin() * 2,)


def make_inputs() -> list[Tensor]:
    return [torch.linspace(-1, 1, 8).requires_grad_()]


def test_gradients_a_little_off_are_wrong() -> None:
    def compiled(factor: float) -> Callable[..., Any]:
        graph = subgraph(double, *make_inputs()).graph
        return partial(wrong_backward, factor=factor)(graph, make_inputs())

    assert not find_wrong_numbers(double, compiled(1.0), make_inputs, True)
    fact = find_wrong_numbers(double, compiled(1.0001), make_inputs, True)
    assert fact.startswith("gradient of input 0 is wrong")


def test_an_output_that_is_missing_is_wrong() -> None:
    fact = find_wrong_numbers(double, lambda x: "no tensor", make_inputs, False)
    assert fact == "the length of output is missing"


def test_a_further_call_that_fails_is_nondeterminism() -> None:
    calls = iter([double])
    fact = find_unrest(double, lambda x: next(calls)(x), make_inputs, False)
    assert fact == "a further call fails: StopIteration: "
