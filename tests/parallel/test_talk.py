"""What ranks are said to say is what their programs say, collective for collective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F  # noqa: N812

from parallel_cases import all_cases
from shardscope._torch.functional_collectives import is_collective
from shardscope._torch.programs import hint_of
from shardscope.parallel import Colwise, Replicate, Rowwise, Shard
from shardscope.parallel.program import ParallelProgram
from shardscope.parallel.talk import listen
from shardscope.parallel.transform import parallelize
from shardscope.record import Phase

KINDS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
CASES = all_cases()
SOME = [
    ("llama of 1", False),
    ("llama of 1", True),
    ("attention whose sequence is cut", True),
    ("attention fused, of several sizes", True),
    ("gpt with its vocabulary cut", False),
]


def spoken_in(graph: fx.Graph) -> Iterator[tuple[Any, ...]]:
    """Kind, axis, shape and dtype of what goes over the wire."""
    for node in graph.nodes:
        if is_collective(node.target):
            value = node.args[0].meta["val"]
            shape = tuple(one if isinstance(one, int) else hint_of(one) for one in value.shape)
            name = node.target.name().removeprefix("_c10d_functional::")
            yield KINDS[name], node.args[-1].split(":")[0], shape, value.dtype


def spoken_by(program: ParallelProgram, rank: int) -> list[tuple[Any, ...]]:
    seat, axes = program.mesh.seat_of(rank), list(program.mesh.axes)
    said = listen(program.flow, seat, gradients=program.gradients)
    return [(str(one.kind), axes[one.axis], one.shape, one.dtype) for one in said]


def check(program: ParallelProgram, *, ranks: list[int] | None = None) -> None:
    for rank in ranks or range(program.mesh.num_ranks):
        is_training = program.is_training
        forward = None if is_training else program.exported(rank).graph
        graph = forward or program.joint(rank).graph_module.graph
        assert spoken_by(program, rank) == list(spoken_in(graph)), f"rank {rank}"


@pytest.mark.parametrize(("name", "is_training"), SOME)
def test_what_is_heard_is_what_the_programs_say(name: str, is_training: bool) -> None:
    program = CASES[name].parallelize(training=is_training)
    assert program.collectives, "nothing to compare"
    check(program, ranks=[program.mesh.num_ranks - 1])


class Moves(nn.Module):
    """Gathers, slices and swaps that no plan asks for, of a size that two ranks share unevenly."""

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
def test_slices_swaps_and_uneven_pieces_are_heard(plan: dict[str, Any], size: int) -> None:
    torch.manual_seed(0)
    exported = torch.export.export(Moves(size), (torch.randn(6, size),))
    program = parallelize(exported, "tp=2", plan, training=True)
    check(program)
    assert {one.phase for one in program.collectives} == {Phase.FORWARD, Phase.BACKWARD}


class Blind(nn.Module):
    """Values through which no gradient comes, each used in pieces while whole."""

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


def test_only_gradients_that_autograd_asks_for_are_heard() -> None:
    exported = torch.export.export(Blind(), (torch.randn(4, 8),))
    plan = {"up": Colwise(), "down": Rowwise()}
    program = parallelize(exported, "tp=2", plan, training=True)
    check(program)
    backward = [one for one in program.collectives if one.phase is Phase.BACKWARD]
    # What `up` takes, and not `blank`, nor `aside`, of which only another output knows.
    assert [one.cause for one in backward] == [
        "gradient of aten.mul's result, which up uses sharded"
    ]


def test_open_sizes_are_heard_at_the_size_of_the_example() -> None:
    batch = torch.export.Dim("batch", min=2)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    exported = torch.export.export(
        model, (torch.randn(6, 8),), dynamic_shapes={"input": {0: 2 * batch}}
    )
    plan = {"0": Colwise(), "2": Rowwise()}
    inputs = {"input": {"dp": Shard(0)}}
    program = parallelize(exported, "dp=2,tp=2", plan, inputs=inputs)
    check(program)
    assert [one.size_bytes for one in program.collectives] == [3 * 8 * 4]
