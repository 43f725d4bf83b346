"""Graphs on DTensors as plain ones, against ranks that are played and hold the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from plain_judge import capture
from shardscope import simulate
from shardscope.compile.diagnose.single_process import (
    has_collectives,
    has_dtensors,
    unwrap_dtensors,
)
from shardscope.compile.diagnose.subgraph.subgraph import Subgraph
from shardscope.world.threaded_ranks import run_ranks_in_threads


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def make_model(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(1)
    model = Mlp()
    with torch.no_grad():  # every rank's piece is the same
        model.up.weight[4:] = model.up.weight[:4]
        model.up.bias[4:] = model.up.bias[:4]
        model.down.weight[:, 4:] = model.down.weight[:, :4]
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def see_rank(rank: int, mesh: DeviceMesh) -> tuple[torch.Tensor, list[torch.Tensor], Subgraph]:
    model = make_model(mesh)
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    expected = model(x)
    expected.sum().backward()
    gradients = [parameter.grad.to_local() for parameter in model.parameters()]
    subgraph = capture(model, x)
    assert has_dtensors(subgraph)
    return expected.detach(), gradients, unwrap_dtensors(subgraph)


def test_what_each_rank_of_a_parallel_model_computes_is_computed_by_one_process() -> None:
    played = run_ranks_in_threads({"tp": 2}, see_rank)
    assert not dist.is_initialized()
    for expected, gradients, plain in played:
        assert not has_dtensors(plain)
        assert not has_collectives(plain)
        assert all(type(value) is torch.Tensor for value in plain.inputs)
        (got,) = plain.graph(*plain.inputs)
        torch.testing.assert_close(got.detach(), expected)
        got.sum().backward()
        # The sum over two ranks is twice the piece here: gradients of pieces double, and those of
        # the bias, of which each rank adds half, do not.
        grown = [value.grad for value in plain.inputs if value.grad is not None]
        for gradient, own, factor in zip(gradients, grown, (2, 2, 2, 1), strict=True):
            torch.testing.assert_close(own, factor * gradient)


def test_nodes_know_the_line_of_the_model() -> None:
    with simulate(mesh={"tp": 2}) as world:
        subgraph = capture(make_model(world.mesh), torch.ones(3, 4))
        plain = unwrap_dtensors(subgraph)
    (relu,) = [node for node in plain.graph.graph.nodes if node.name == "relu"]
    assert "torch.relu(self.up(x))" in relu.meta["stack_trace"]


def test_sequence_parallel_models_are_plain_too() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.up = nn.Linear(4, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(self.norm(x))

    with simulate(mesh={"tp": 2}) as world:
        plan: dict[str, Any] = {"norm": SequenceParallel(), "up": ColwiseParallel()}
        model = parallelize_module(Block(), world.mesh, plan)
        subgraph = capture(model, torch.ones(1, 6, 4))
        (expected,) = subgraph.graph(*subgraph.inputs)
        plain = unwrap_dtensors(subgraph)
    (got,) = plain.graph(*plain.inputs)
    assert (got.shape, got.stride()) == (expected.shape, expected.stride())


def test_dtensors_that_come_out_are_this_ranks_shards() -> None:
    with simulate(mesh={"tp": 2}) as world:
        model = parallelize_module(Mlp().up, world.mesh, ColwiseParallel(use_local_output=False))
        subgraph = capture(model, torch.ones(3, 4))
        (expected,) = subgraph.graph(*subgraph.inputs)
        assert isinstance(expected, DTensor)
        plain = unwrap_dtensors(subgraph)
    (got,) = plain.graph(*plain.inputs)
    torch.testing.assert_close(got, expected.to_local())


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own making
def test_graphs_of_fsdps_blocks_are_plain_as_they_are() -> None:
    subgraphs: list[Subgraph] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        subgraphs.append(Subgraph(graph, tuple(inputs), with_gradients=True))
        return graph

    with simulate(mesh={"dp": 2}) as world:
        model = fully_shard(Mlp(), mesh=world.mesh)
        model.compile(backend=keep)
        model(torch.ones(3, 4))
        torch.compiler.reset()
    assert [has_dtensors(subgraph) for subgraph in subgraphs] == [False]
    assert not any(map(has_collectives, subgraphs))


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own making
def test_blocks_that_are_sharded_and_parallel_are_made_plain() -> None:
    subgraphs: list[Subgraph] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        subgraphs.append(Subgraph(graph, tuple(inputs), with_gradients=True))
        subgraphs.append(unwrap_dtensors(subgraphs[0]))
        return graph

    with simulate(mesh={"dp": 2, "tp": 2}) as world:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model = parallelize_module(Mlp(), world.mesh["tp"], plan)
        fully_shard(model, mesh=world.mesh["dp"]).compile(backend=keep)
        model(torch.ones(3, 4))
        torch.compiler.reset()
    before, after = subgraphs
    assert has_dtensors(before)
    assert not has_dtensors(after)
    (got,) = after.graph(*after.inputs)
    assert got.shape == (3, 4)


def test_a_dtensor_that_is_written_to_comes_out_as_what_was_written() -> None:
    def program(x: DTensor) -> DTensor:
        x.mul_(2)
        return x + 1

    with simulate(mesh={"tp": 2}) as world:
        x = distribute_tensor(torch.ones(4, 2), world.mesh, [Shard(0)])
        plain = unwrap_dtensors(capture(program, x, with_gradients=False))
    assert not any(isinstance(value, DTensor | DeviceMesh) for value in plain.inputs)
    written, got = plain.graph(torch.ones(2, 2))
    assert (written.unique().item(), got.unique().item()) == (2, 3)
