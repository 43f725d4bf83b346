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
from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.localizing.collectives import has_collectives, make_local
from shardscope.world.play import play

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
    one, other = functional.all_reduce_coalesced([x, x + 1], "sum", group)
    (both,) = functional.all_gather_into_tensor_coalesced([one * other], group)
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


def play_and_make_local(program: Program, rank: int, mesh: DeviceMesh) -> tuple[Any, Fragment]:
    group = mesh.get_group()
    x = torch.linspace(-1, 2, 16).reshape(4, 4)
    fragment = capture(lambda x: program(x, group), x, with_gradients=False)
    (wanted,) = fragment.graph(x)
    return wanted, make_local(fragment)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_ranks_that_are_alike_get_what_one_process_gets_without_them(program: Program) -> None:
    played = play({"tp": 2}, lambda rank, mesh: play_and_make_local(program, rank, mesh))
    assert not dist.is_initialized()
    for wanted, local in played:
        assert not has_collectives(local)
        (got,) = local.graph(*local.inputs)
        assert look(got) == look(wanted)
        torch.testing.assert_close(got, wanted)


@pytest.fixture
def lonely_gloo() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,)).get_group()
    dist.destroy_process_group()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_a_real_group_of_one_rank_is_replaced_too(
    program: Program, lonely_gloo: dist.ProcessGroup
) -> None:
    x = torch.linspace(-1, 2, 16).reshape(4, 4)
    fragment = capture(lambda x: program(x, lonely_gloo), x, with_gradients=False)
    local = make_local(fragment)
    assert has_collectives(fragment)
    assert not has_collectives(local)
    (wanted,), (got,) = fragment.graph(x), local.graph(x)
    assert look(got) == look(wanted)
    torch.testing.assert_close(got, wanted)


ops = torch.ops._c10d_functional


def make_fragment(*calls: tuple[Any, tuple[Any, ...]], group: Any = None) -> Fragment:
    """A graph that calls one op on what the one before made."""
    graph = torch.fx.Graph()
    last = graph.placeholder("x")
    given = [] if group is None else [graph.placeholder("group")]
    for op, args in calls:
        last = graph.call_function(op, (last, *(given[0] if one is ... else one for one in args)))
        last.meta["stack_trace"] = "here"
    graph.output((last, *given))
    values = (torch.arange(6.0).reshape(3, 2), *([] if group is None else [group]))
    return Fragment(torch.fx.GraphModule({}, graph), values, with_gradients=False)


def test_overloads_are_replaced_as_packets_are_and_keep_their_lines() -> None:
    fragment = make_fragment(
        (ops.all_gather_into_tensor.default, (2, "nobody knows it")), (ops.wait_tensor.default, ())
    )
    local = make_local(fragment)
    (got,) = local.graph(*local.inputs)
    assert torch.equal(got, torch.cat([fragment.inputs[0]] * 2))
    called = [node for node in local.graph.graph.nodes if node.op == "call_function"]
    assert [(node.target, node.meta["stack_trace"]) for node in called] == [(torch.cat, "here")]


def test_pieces_of_uneven_sizes_come_out_as_large_as_the_real_ones() -> None:
    fragment = make_fragment((ops.all_to_all_single.default, ([4, 1], [1, 2], "nobody")))
    local = make_local(fragment)
    (got,) = local.graph(*local.inputs)
    assert got.shape == (5, 2)


def test_what_is_written_in_place_is_written() -> None:
    fragment = make_fragment((ops.all_reduce_.default, ("sum", "nobody")))
    local = make_local(fragment)
    x = fragment.inputs[0].clone()
    (got,) = local.graph(x)
    assert got.data_ptr() == x.data_ptr()


def test_a_group_that_is_an_input_is_one_no_more(lonely_gloo: dist.ProcessGroup) -> None:
    fragment = make_fragment((ops.all_reduce.default, ("sum", ...)), group=lonely_gloo)
    local = make_local(fragment)
    assert len(local.inputs) == 1
    (got,) = local.graph(*local.inputs)
    assert torch.equal(got, fragment.inputs[0])


def test_gradients_go_through_what_a_collective_became() -> None:
    fragment = make_fragment((ops.all_gather_into_tensor.default, (3, "nobody")))
    x = fragment.inputs[0].clone().requires_grad_()
    make_local(fragment).graph(x)[0].sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))


def test_a_graph_that_says_nothing_stays_as_it_is() -> None:
    fragment = make_fragment((torch.relu, ()))
    assert make_local(fragment) is fragment
