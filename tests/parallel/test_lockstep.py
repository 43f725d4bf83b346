"""Ranks in lockstep and ranks as threads compute the same: one semantics of collectives."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from shardscope._torch.collectives.functional import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    WAIT,
)
from shardscope.errors import CollectiveError
from shardscope.parallel.verify.lockstep import run_in_lockstep
from shardscope.world.threaded_ranks import run_ranks_in_threads

REDUCTIONS = ("sum", "avg", "max", "min", "product")
BITWISE = ("band", "bor", "bxor")
ROWS = 12  # divisible by every number of ranks below, squared where a program scatters twice

Emit = Callable[[fx.Graph, fx.Node, int, str], fx.Node]


def emit_all_reduce(reduction: str) -> Emit:
    return lambda graph, x, size, group: graph.call_function(ALL_REDUCE, (x, reduction, group))


def emit_reduce_scatter(reduction: str) -> Emit:
    return lambda graph, x, size, group: graph.call_function(
        REDUCE_SCATTER, (x, reduction, size, group)
    )


def emit_all_gather(graph: fx.Graph, x: fx.Node, size: int, group: str) -> fx.Node:
    return graph.call_function(ALL_GATHER, (x, size, group))


def emit_all_to_all(graph: fx.Graph, x: fx.Node, size: int, group: str) -> fx.Node:
    splits = [ROWS // size] * size
    return graph.call_function(ALL_TO_ALL, (x, splits, splits, group))


def build(emitters: list[Emit], size: int, group: str) -> fx.GraphModule:
    """A program that applies collectives one after the other, and returns every result."""
    graph = fx.Graph()
    value, results = graph.placeholder("x"), []
    for emit in emitters:
        value = graph.call_function(WAIT, (emit(graph, value, size, group),))
        results.append(value)
    graph.output(results)
    return fx.GraphModule({}, graph)


def run_both(
    emitters: list[Emit], inputs: list[torch.Tensor]
) -> tuple[dict[int, list[torch.Tensor]], list[list[torch.Tensor]]]:
    """The results by rank: in lockstep, and as threads."""
    size = len(inputs)

    def run_rank(rank: int, mesh: DeviceMesh) -> list[torch.Tensor]:
        program = build(emitters, size, mesh.get_group().group_name)
        return fx.Interpreter(program).run(inputs[rank].clone())

    threaded = run_ranks_in_threads({"x": size}, run_rank)
    programs = {rank: build(emitters, size, "x") for rank in range(size)}
    arguments = {rank: [inputs[rank].clone()] for rank in range(size)}
    return run_in_lockstep(programs, arguments, {"x": range(size)}), threaded


def check_both(emitters: list[Emit], inputs: list[torch.Tensor]) -> None:
    lockstep, threaded = run_both(emitters, inputs)
    for rank, results in enumerate(threaded):
        for actual, expected in zip(lockstep[rank], results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def make_inputs(size: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (size, ROWS, 2)
    if dtype.is_floating_point:
        return list(torch.randn(shape, generator=generator).to(dtype))
    return list(torch.randint(0, 64, shape, generator=generator, dtype=dtype))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_collective_and_reduction_is_the_same_in_lockstep_and_in_threads(
    size: int, dtype: torch.dtype
) -> None:
    inputs = make_inputs(size, dtype)
    check_both([emit_all_gather], inputs)
    check_both([emit_all_to_all], inputs)
    for reduction in REDUCTIONS:
        check_both([emit_all_reduce(reduction)], inputs)
        check_both([emit_reduce_scatter(reduction)], inputs)


@pytest.mark.parametrize("reduction", [*BITWISE, "sum", "product", "max", "min"])
def test_integers_are_reduced_the_same_in_lockstep_and_in_threads(reduction: str) -> None:
    inputs = make_inputs(2, torch.int64)
    check_both([emit_all_reduce(reduction)], inputs)
    check_both([emit_reduce_scatter(reduction)], inputs)


@pytest.mark.parametrize("seed", range(6))
def test_random_programs_are_the_same_in_lockstep_and_in_threads(seed: int) -> None:
    random_numbers = random.Random(seed)
    emitters: list[Emit] = []
    for _ in range(4):
        reduction = random_numbers.choice(REDUCTIONS)
        emitters += random_numbers.choice(
            [
                [emit_all_to_all],
                [emit_all_reduce(reduction)],
                [emit_reduce_scatter(reduction), emit_all_gather],
            ]
        )
    dtype = random_numbers.choice([torch.float32, torch.float16, torch.float64])
    check_both(emitters, make_inputs(random_numbers.choice([2, 3, 4]), dtype, seed))


def test_uneven_splits_are_the_same_in_lockstep_and_in_threads() -> None:
    """Rank 0 sends 1 row to itself and 2 to rank 1; rank 1 sends 3 and 1."""
    sent = [[1, 2], [3, 1]]

    def build_for(rank: int, group: str) -> fx.GraphModule:
        received = [splits[rank] for splits in sent]

        def emit(graph: fx.Graph, x: fx.Node, size: int, name: str) -> fx.Node:
            return graph.call_function(ALL_TO_ALL, (x, received, sent[rank], name))

        return build([emit], 2, group)

    inputs = [torch.arange(sum(splits)) + 10 * rank for rank, splits in enumerate(sent)]

    def run_rank(rank: int, mesh: DeviceMesh) -> Any:
        program = build_for(rank, mesh.get_group().group_name)
        return fx.Interpreter(program).run(inputs[rank].clone())

    threaded = run_ranks_in_threads({"x": 2}, run_rank)
    lockstep = run_in_lockstep(
        {rank: build_for(rank, "x") for rank in range(2)},
        {rank: [inputs[rank]] for rank in range(2)},
        {"x": range(2)},
    )
    assert [[t.tolist() for t in lockstep[rank]] for rank in range(2)] == [
        [[0, 10, 11, 12]],
        [[1, 2, 13]],
    ]
    assert [[t.tolist() for t in results] for results in threaded] == [
        [t.tolist() for t in lockstep[rank]] for rank in range(2)
    ]


def test_results_of_ranks_in_lockstep_share_no_memory() -> None:
    lockstep, _ = run_both([emit_all_reduce("sum")], make_inputs(2, torch.float32))
    (first,), (second,) = lockstep[0], lockstep[1]
    first.add_(1)
    assert not torch.equal(first, second)


def test_ranks_that_disagree_on_a_reduction_are_refused_in_lockstep() -> None:
    programs = {
        rank: build([emit_all_reduce(reduction)], 2, "x")
        for rank, reduction in enumerate(("sum", "max"))
    }
    with pytest.raises(CollectiveError, match="ranks disagree on a collective: rank 0"):
        run_in_lockstep(programs, {rank: [torch.ones(2)] for rank in range(2)}, {"x": range(2)})
