"""What differs from run to run, or by what is drawn at random, is known for what it is."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional

from compile_backends import (
    always_wrong,
    eager,
    fragment,
    layered,
    numbers,
)
from shardscope.compile.diagnose.compiler import Compiler
from shardscope.compile.diagnose.judging.judge import judge
from shardscope.record import Condition


def test_a_backend_that_is_wrong_in_a_new_way_each_time_is_wrong_and_says_so():
    outcome = judge(layered(), Compiler(always_wrong))
    assert outcome.condition is Condition.WRONG_RESULT
    assert outcome.fact.endswith("; the wrong numbers differ from run to run")


def test_a_backend_that_is_wrong_once_is_nondeterministic():
    def backend(graph, inputs):
        count = itertools.count()
        return lambda *given: [one * 2 if not next(count) else one for one in graph(*given)]

    assert judge(layered(), Compiler(backend)).condition is Condition.NONDETERMINISTIC


def test_a_backend_that_is_right_once_is_nondeterministic():
    def backend(graph, inputs):
        count = itertools.count()
        return lambda *given: [one * 2 if next(count) else one for one in graph(*given)]

    outcome = judge(layered(), Compiler(backend))
    assert outcome.condition is Condition.NONDETERMINISTIC
    assert outcome.fact.startswith("it is correct at first, but not when it is run again: output 0")


def test_a_backend_that_runs_once_is_nondeterministic():
    def backend(graph, inputs):
        calls = iter([graph])
        return lambda *given: next(calls)(*given)

    outcome = judge(layered(), Compiler(backend))
    assert outcome.condition is Condition.NONDETERMINISTIC
    assert outcome.fact.startswith("it fails when it is run again: running it fails: StopIter")


def test_a_backend_that_fails_only_when_run_again_is_nondeterministic():
    def backend(graph, inputs):
        count = itertools.count()

        def run(*given):
            if next(count):
                raise RuntimeError("gone")
            return [one * 2 for one in graph(*given)]

        return run

    assert judge(layered(), Compiler(backend)).condition is Condition.NONDETERMINISTIC


@torch.library.custom_op("shardscope_tests::unsteady", mutates_args=())
def unsteady(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + next(_DRIFT) * 0.1)


# Eager execution, compiled, double precision, the look for draws, and again.
_DRIFT = itertools.chain([0, 1, 0, 0], itertools.cycle([1, 0]))


def test_a_function_that_is_itself_unsteady_is_not_the_compilers_fault():
    def run(x):
        return torch.ops.shardscope_tests.unsteady(x) * 2

    piece = fragment(run, numbers(100, grad=False), with_gradients=False)
    outcome = judge(piece, Compiler(eager))
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
    piece = fragment(drop, numbers(8, 16), numbers(16, 16, seed=2))
    outcome = judge(piece, Compiler(redrawn))
    assert outcome.condition is Condition.RNG
    assert not outcome.is_bad
    assert outcome.fact.startswith("only its random numbers differ: output 0 is off by ")


def test_the_same_random_numbers_are_fine():
    piece = fragment(drop, numbers(8, 16), numbers(16, 16, seed=2))
    assert judge(piece, Compiler(eager)).condition is Condition.FINE


def test_a_fault_beside_other_random_numbers_is_found():
    def backend(graph, inputs):
        return lambda *given: [one * 1.01 for one in redrawn(graph, inputs)(*given)]

    piece = fragment(drop, numbers(8, 16), numbers(16, 16, seed=2))
    assert judge(piece, Compiler(backend)).condition is Condition.WRONG_RESULT


def test_a_fault_before_what_is_drawn_is_found():
    def backend(graph, inputs):
        for node in graph.graph.nodes:
            if node.target is torch.relu:
                node.target = torch.abs
        graph.recompile()
        return redrawn(graph, inputs)

    piece = fragment(drop, numbers(8, 16), numbers(16, 16, seed=2))
    assert judge(piece, Compiler(backend)).condition is Condition.WRONG_RESULT


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
    piece = fragment(draw, numbers(8, 16))
    assert judge(piece, Compiler(redrawn)).condition is Condition.RNG


def test_the_random_state_is_left_as_it_was():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    judge(fragment(drop, numbers(8, 16), numbers(16, 16, seed=2)), Compiler(redrawn))
    assert torch.equal(torch.rand(3), expected)
