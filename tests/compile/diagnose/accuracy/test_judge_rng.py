"""What differs from run to run, or by what is drawn at random, is known for what it is."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional

from compile_backends import (
    always_wrong,
    eager,
    layered,
    numbers,
    subgraph,
)
from shardscope.compile.diagnose.accuracy.judge import check_accuracy
from shardscope.compile.diagnose.subgraph.subgraph import Compiler
from shardscope.record import Condition


def test_a_backend_that_is_wrong_in_a_new_way_each_time_is_wrong_and_says_so():
    outcome = check_accuracy(layered(), Compiler(always_wrong))
    assert outcome.condition is Condition.WRONG_RESULT
    assert outcome.fact.endswith("; the wrong numbers differ from run to run")


def test_a_backend_that_is_wrong_once_is_nondeterministic():
    def backend(graph, inputs):
        count = itertools.count()
        return lambda *given: [value * 2 if not next(count) else value for value in graph(*given)]

    assert check_accuracy(layered(), Compiler(backend)).condition is Condition.NONDETERMINISTIC


def test_a_backend_that_is_right_once_is_nondeterministic():
    def backend(graph, inputs):
        count = itertools.count()
        return lambda *given: [value * 2 if next(count) else value for value in graph(*given)]

    outcome = check_accuracy(layered(), Compiler(backend))
    assert outcome.condition is Condition.NONDETERMINISTIC
    assert outcome.fact.startswith("it is correct at first, but not when it is run again: output 0")


def test_a_backend_that_runs_once_is_nondeterministic():
    def backend(graph, inputs):
        calls = iter([graph])
        return lambda *given: next(calls)(*given)

    outcome = check_accuracy(layered(), Compiler(backend))
    assert outcome.condition is Condition.NONDETERMINISTIC
    assert outcome.fact.startswith("it fails when it is run again: running it fails: StopIter")


def test_a_backend_that_fails_only_when_run_again_is_nondeterministic():
    def backend(graph, inputs):
        count = itertools.count()

        def run(*given):
            if next(count):
                raise RuntimeError("gone")
            return [value * 2 for value in graph(*given)]

        return run

    assert check_accuracy(layered(), Compiler(backend)).condition is Condition.NONDETERMINISTIC


@torch.library.custom_op("shardscope_tests::unsteady", mutates_args=())
def unsteady(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + next(_DRIFT) * 0.1)


# Eager execution, compiled, double precision, the look for draws, and again.
_DRIFT = itertools.chain([0, 1, 0, 0], itertools.cycle([1, 0]))


def test_a_function_that_is_itself_unsteady_is_not_the_compilers_fault():
    def run(x):
        return torch.ops.shardscope_tests.unsteady(x) * 2

    part = subgraph(run, numbers(100, grad=False), with_gradients=False)
    outcome = check_accuracy(part, Compiler(eager))
    assert outcome.condition is Condition.FINE
    assert outcome.fact == "eager execution gives different numbers each time too"


def redrawn(graph, inputs):
    """Draws other numbers than eager execution does."""

    def run(*given):
        torch.rand(3)
        return graph(*given)

    return run


def drop(x, w):
    return functional.dropout(torch.relu(x @ w), 0.5) @ w


def test_other_random_numbers_are_no_fault():
    part = subgraph(drop, numbers(8, 16), numbers(16, 16, seed=2))
    outcome = check_accuracy(part, Compiler(redrawn))
    assert outcome.condition is Condition.RNG
    assert not outcome.is_bad
    assert outcome.fact.startswith("only its random numbers differ: output 0 is off by ")


def test_the_same_random_numbers_are_fine():
    part = subgraph(drop, numbers(8, 16), numbers(16, 16, seed=2))
    assert check_accuracy(part, Compiler(eager)).condition is Condition.FINE


def test_a_fault_beside_other_random_numbers_is_found():
    def backend(graph, inputs):
        return lambda *given: [value * 1.01 for value in redrawn(graph, inputs)(*given)]

    part = subgraph(drop, numbers(8, 16), numbers(16, 16, seed=2))
    assert check_accuracy(part, Compiler(backend)).condition is Condition.WRONG_RESULT


def test_a_fault_before_what_is_drawn_is_found():
    def backend(graph, inputs):
        for node in graph.graph.nodes:
            if node.target is torch.relu:
                node.target = torch.abs
        graph.recompile()
        return redrawn(graph, inputs)

    part = subgraph(drop, numbers(8, 16), numbers(16, 16, seed=2))
    assert check_accuracy(part, Compiler(backend)).condition is Condition.WRONG_RESULT


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x * torch.rand_like(x),
        lambda x: (x * 2).bernoulli_(0.5) * x,
        lambda x: functional.dropout(x * 2, 0.5, True, True) + x,
        lambda x: torch.ops.aten.native_dropout(x * 2, 0.5, True)[0] * x,
        lambda x: torch.multinomial(x.exp(), 2) + 1,
    ],
    ids=["tensor", "in place", "in place by name", "several results", "whole numbers"],
)
def test_ops_that_draw_in_any_way_are_taken_out(draw):
    part = subgraph(draw, numbers(8, 16))
    assert check_accuracy(part, Compiler(redrawn)).condition is Condition.RNG


def test_the_random_state_is_left_as_it_was():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    check_accuracy(subgraph(drop, numbers(8, 16), numbers(16, 16, seed=2)), Compiler(redrawn))
    assert torch.equal(torch.rand(3), expected)
