"""Traced collective schedules equal the collectives in the ranks' programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F  # noqa: N812

from parallel_cases import all_cases
from shardscope._torch.collectives.functional import is_collective
from shardscope._torch.export import hint_of
from shardscope.parallel import Colwise, Replicate, Rowwise, Shard
from shardscope.parallel.api import parallelize
from shardscope.parallel.passes.schedule import trace_collectives
from shardscope.parallel.program import ParallelProgram
from shardscope.record import Phase

KINDS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
CASES = all_cases()
SELECTED = [
    ("llama of 1", False),
    ("llama of 1", True),
    ("attention whose sequence is cut", True),
    ("attention fused, of several sizes", True),
    ("gpt with its vocabulary cut", False),
]


def collectives_in(graph: fx.Graph) -> Iterator[tuple[Any, ...]]:
    """Kind, axis, shape and dtype of each collective in a graph."""
    for node in graph.nodes:
        if is_collective(node.target):
            value = node.args[0].meta["val"]
            shape = tuple(size if isinstance(size, int) else hint_of(size) for size in value.shape)
            name = node.target.name().removeprefix("_c10d_functional::")
            yield KINDS[name], node.args[-1].split(":")[0], shape, value.dtype


def collectives_of(program: ParallelProgram, rank: int) -> list[tuple[Any, ...]]:
    coordinate, axes = program.mesh.coordinate_of(rank), list(program.mesh.axes)
    schedule = trace_collectives(program.graph, coordinate, gradients=program.gradients)
    return [
        (str(collective.kind), axes[collective.axis], collective.shape, collective.dtype)
        for collective in schedule
    ]


def check(program: ParallelProgram, *, ranks: list[int] | None = None) -> None:
    for rank in ranks or range(program.mesh.num_ranks):
        is_training = program.is_training
        forward = None if is_training else program.exported(rank).graph
        graph = forward or program.joint(rank).graph_module.graph
        assert collectives_of(program, rank) == list(collectives_in(graph)), f"rank {rank}"


@pytest.mark.parametrize(("name", "is_training"), SELECTED)
def test_traced_collectives_are_those_of_the_programs(name: str, is_training: bool) -> None:
    program = CASES[name].parallelize(training=is_training)
    assert program.collectives, "nothing to compare"
    check(program, ranks=[program.mesh.num_ranks - 1])


class Reshards(nn.Module):
    """Needs gathers, slices and all-to-alls that no plan demands; a size of 7 is uneven."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first = nn.Linear(size, size)
        self.second = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return (self.second(h.cumsum(-1).softmax(-1)) * h.flip(-1)).pow(2).sum()


@pytest.mark.parametrize("size", [8, 7], ids=["even", "uneven"])
@pytest.mark.parametrize(
    "plan",
    [
        {"first": Colwise(), "second": Rowwise()},
        {"first": Colwise(output=Shard(0)), "second": Rowwise(output=Shard(-1))},
        {"first": Colwise(output=Replicate()), "second": Colwise(input=Shard(0))},
    ],
    ids=["pair", "swapped", "sliced"],
)
def test_slices_all_to_alls_and_uneven_shards_are_traced(plan: dict[str, Any], size: int) -> None:
    torch.manual_seed(0)
    exported = torch.export.export(Reshards(size), (torch.randn(6, size),))
    program = parallelize(exported, "tp=2", plan, training=True)
    check(program)
    assert {collective.phase for collective in program.collectives} == {
        Phase.FORWARD,
        Phase.BACKWARD,
    }


class NoGradient(nn.Module):
    """Replicated values without a gradient, which sharded ops read."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(4, 8))
        self.aside = nn.Parameter(torch.ones(4, 8))
        self.frozen = nn.Parameter(torch.ones(4, 8), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        blank = torch.zeros_like(self.scale) + self.frozen + self.scale.detach()
        h = self.up(x * self.scale) + F.linear(blank, self.up.weight)
        return self.down(h.relu()).sum(), self.up(x + self.aside).sum()


def test_only_gradients_that_autograd_computes_are_traced() -> None:
    exported = torch.export.export(NoGradient(), (torch.randn(4, 8),))
    plan = {"up": Colwise(), "down": Rowwise()}
    program = parallelize(exported, "tp=2", plan, training=True)
    check(program)
    backward = [
        collective for collective in program.collectives if collective.phase is Phase.BACKWARD
    ]
    # The input of `up`, not `blank`, nor `aside`, which only the other output depends on.
    assert [collective.cause for collective in backward] == [
        "gradient of aten.mul's result, which up uses sharded"
    ]


def test_dynamic_sizes_are_traced_at_the_size_of_the_example() -> None:
    batch = torch.export.Dim("batch", min=2)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    exported = torch.export.export(
        model, (torch.randn(6, 8),), dynamic_shapes={"input": {0: 2 * batch}}
    )
    plan = {"0": Colwise(), "2": Rowwise()}
    inputs = {"input": {"dp": Shard(0)}}
    program = parallelize(exported, "dp=2,tp=2", plan, inputs=inputs)
    check(program)
    assert [collective.size_bytes for collective in program.collectives] == [3 * 8 * 4]
