"""Collectives in a graph, made local: against ranks that hold the same, played and real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from plain_judge import capture
from shardscope.compile.diagnose.single_process import has_collectives, replace_collectives
from shardscope.compile.diagnose.subgraph.subgraph import Subgraph
from shardscope.world.threaded_ranks import run_ranks_in_threads

Program = Callable[[torch.Tensor, Any], torch.Tensor]


def all_reduced(x: torch.Tensor, group: Any) -> torch.Tensor:
    return functional.all_reduce(x * 2, "sum", group) + 1


def reduced_in_other_ways(x: torch.Tensor, group: Any) -> torch.Tensor:
    return functional.all_reduce(x, "max", group) + functional.all_reduce(x + 1, "min", group)


def multiplied(x: torch.Tensor, group: Any) -> torch.Tensor:
    return functional.all_reduce(x, "product", group)


def gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
    return functional.all_gather_tensor(x, 0, group) * 2


def scattered(x: torch.Tensor, group: Any) -> torch.Tensor:
    return functional.reduce_scatter_tensor(x, "sum", 0, group) * 2


def exchanged(x: torch.Tensor, group: Any) -> torch.Tensor:
    return functional.all_to_all_single(x, None, None, group) * 2


def broadcast(x: torch.Tensor, group: Any) -> torch.Tensor:
    return functional.broadcast(x, 0, group) * 2


def coalesced(x: torch.Tensor, group: Any) -> torch.Tensor:
    first, second = functional.all_reduce_coalesced([x, x + 1], "sum", group)
    (both,) = functional.all_gather_into_tensor_coalesced([first * second], group)
    return both


def in_place(x: torch.Tensor, group: Any) -> torch.Tensor:
    y = x * 2
    dist.all_reduce(y, group=group)
    parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, y, group=group)
    return y + parts[0] + dist.get_world_size()


PROGRAMS = [
    all_reduced,
    reduced_in_other_ways,
    multiplied,
    gathered,
    scattered,
    exchanged,
    broadcast,
    coalesced,
    in_place,
]


def look(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.stride()


def play_and_make_local(program: Program, rank: int, mesh: DeviceMesh) -> tuple[Any, Subgraph]:
    group = mesh.get_group()
    x = torch.linspace(-1, 2, 16).reshape(4, 4)
    subgraph = capture(lambda x: program(x, group), x, with_gradients=False)
    (expected,) = subgraph.graph(x)
    return expected, replace_collectives(subgraph)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda function: function.__name__)
def test_ranks_that_are_identical_get_what_one_process_gets_without_them(program: Program) -> None:
    played = run_ranks_in_threads(
        {"tp": 2}, lambda rank, mesh: play_and_make_local(program, rank, mesh)
    )
    assert not dist.is_initialized()
    for expected, local in played:
        assert not has_collectives(local)
        (got,) = local.graph(*local.inputs)
        assert look(got) == look(expected)
        torch.testing.assert_close(got, expected)


@pytest.fixture
def lonely_gloo() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,)).get_group()
    dist.destroy_process_group()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda function: function.__name__)
def test_a_real_group_of_one_rank_is_replaced_too(
    program: Program, lonely_gloo: dist.ProcessGroup
) -> None:
    x = torch.linspace(-1, 2, 16).reshape(4, 4)
    subgraph = capture(lambda x: program(x, lonely_gloo), x, with_gradients=False)
    local = replace_collectives(subgraph)
    assert has_collectives(subgraph)
    assert not has_collectives(local)
    (expected,), (got,) = subgraph.graph(x), local.graph(x)
    assert look(got) == look(expected)
    torch.testing.assert_close(got, expected)


ops = torch.ops._c10d_functional


def make_subgraph(*calls: tuple[Any, tuple[Any, ...]], group: Any = None) -> Subgraph:
    """A graph that calls one op on what the one before made."""
    graph = torch.fx.Graph()
    last = graph.placeholder("x")
    arguments = [] if group is None else [graph.placeholder("group")]
    for op, args in calls:
        last = graph.call_function(
            op, (last, *(arguments[0] if argument is ... else argument for argument in args))
        )
        last.meta["stack_trace"] = "here"
    graph.output((last, *arguments))
    values = (torch.arange(6.0).reshape(3, 2), *([] if group is None else [group]))
    return Subgraph(torch.fx.GraphModule({}, graph), values, with_gradients=False)


def test_overloads_are_replaced_as_packets_are_and_keep_their_lines() -> None:
    subgraph = make_subgraph(
        (ops.all_gather_into_tensor.default, (2, "nobody knows it")), (ops.wait_tensor.default, ())
    )
    local = replace_collectives(subgraph)
    (got,) = local.graph(*local.inputs)
    assert torch.equal(got, torch.cat([subgraph.inputs[0]] * 2))
    called = [node for node in local.graph.graph.nodes if node.op == "call_function"]
    assert [(node.target, node.meta["stack_trace"]) for node in called] == [(torch.cat, "here")]


def test_shards_of_uneven_sizes_come_out_as_large_as_the_real_ones() -> None:
    subgraph = make_subgraph((ops.all_to_all_single.default, ([4, 1], [1, 2], "nobody")))
    local = replace_collectives(subgraph)
    (got,) = local.graph(*local.inputs)
    assert got.shape == (5, 2)


def test_what_is_written_in_place_is_written() -> None:
    subgraph = make_subgraph((ops.all_reduce_.default, ("sum", "nobody")))
    local = replace_collectives(subgraph)
    x = subgraph.inputs[0].clone()
    (got,) = local.graph(x)
    assert got.data_ptr() == x.data_ptr()


def test_a_group_is_no_longer_an_input(lonely_gloo: dist.ProcessGroup) -> None:
    subgraph = make_subgraph((ops.all_reduce.default, ("sum", ...)), group=lonely_gloo)
    local = replace_collectives(subgraph)
    assert len(local.inputs) == 1
    (got,) = local.graph(*local.inputs)
    assert torch.equal(got, subgraph.inputs[0])


def test_gradients_go_through_what_a_collective_became() -> None:
    subgraph = make_subgraph((ops.all_gather_into_tensor.default, (3, "nobody")))
    x = subgraph.inputs[0].clone().requires_grad_()
    replace_collectives(subgraph).graph(x)[0].sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))


def test_a_graph_without_collectives_is_unchanged() -> None:
    subgraph = make_subgraph((torch.relu, ()))
    assert replace_collectives(subgraph) is subgraph
