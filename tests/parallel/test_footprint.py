"""The memory of programs, compared with figures computed by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from shardscope.parallel import Colwise, Replicate, Rowwise, Shard
from shardscope.parallel.api import parallelize
from shardscope.parallel.passes.memory_use import measure
from shardscope.parallel.program import ParallelProgram
from shardscope.record import RankMemory

FLOAT = 4
PAIR = {"up": Colwise(), "down": Rowwise()}


class Pair(nn.Module):
    """A batch of 4 through 8 → 32 → 8, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32, bias=False)
        self.down = nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def partition(
    model: nn.Module, *shape: int, mesh: str = "tp=2", plan: object = None, training: bool = False
) -> ParallelProgram:
    exported = torch.export.export(model, (torch.randn(shape),))
    return parallelize(exported, mesh, plan, training=training, verify=False)


def test_forward_peak_is_what_is_alive_at_once() -> None:
    memory = partition(Pair(), 4, 8, plan=PAIR).memory(0)
    hidden = 4 * 16 * FLOAT
    assert memory == RankMemory(
        ranks=memory.ranks,
        parameter_bytes=2 * 8 * 16 * FLOAT,
        buffer_bytes=0,
        input_bytes=4 * 8 * FLOAT,
        gradient_bytes=0,
        intermediate_bytes=2 * hidden,  # before and after the ReLU
        peak_bytes=2 * 8 * 16 * FLOAT + 4 * 8 * FLOAT + 2 * hidden,
        peak_node="relu",
        peak_module="",
    )


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()

    def forward(self, x: Tensor) -> Tensor:
        return self.pair(x).pow(2).sum()


def test_training_holds_gradients_and_what_backward_needs() -> None:
    plan = {f"pair.{name}": style for name, style in PAIR.items()}
    memory = partition(Loss(), 4, 8, plan=plan, training=True).memory(0)
    weight, hidden, loss = 8 * 16 * FLOAT, 4 * 16 * FLOAT, FLOAT
    assert memory.gradient_bytes == 2 * weight
    # The ReLU's result, its gradient, that gradient's gradient, and the loss.
    assert memory.intermediate_bytes == 3 * hidden + loss
    # By then the gradient of `down` is there, that of `up` is not.
    assert memory.peak_bytes == 2 * weight + 4 * 8 * FLOAT + memory.intermediate_bytes + weight
    assert memory.peak_node == "threshold_backward"


def test_two_ranks_hold_the_parameters_of_one_device_between_them() -> None:
    model = Pair()
    total_bytes = sum(parameter.numel() * FLOAT for parameter in model.parameters())
    program = partition(model, 4, 8, plan=PAIR)
    assert sum(program.memory(rank).parameter_bytes for rank in (0, 1)) == total_bytes
    alone = partition(model, 4, 8, mesh="tp=1", plan=PAIR)
    assert alone.memory(0).parameter_bytes == total_bytes


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("shift", torch.ones(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.embed(x) * self.scale + self.shift)
        return result


def test_tied_weights_count_once_and_buffers_of_both_kinds_count() -> None:
    exported = torch.export.export(Tied(), (torch.randint(12, (3, 5)),))
    plan = {"embed": Rowwise(), "head": Colwise(output=Replicate())}
    memory = parallelize(exported, "tp=2", plan, verify=False).memory(1)
    assert memory.parameter_bytes == 6 * 8 * FLOAT
    assert memory.buffer_bytes == 2 * 8 * FLOAT
    assert memory.input_bytes == 3 * 5 * 8


def test_ranks_with_equal_shapes_share_a_record() -> None:
    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Linear(4, 5, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.only(x)
            return result

    exported = torch.export.export(Uneven(), (torch.randn(2, 4),))
    plan = {"only": Colwise(output=Shard(-1))}
    program = parallelize(exported, "dp=2,tp=2", plan, verify=False, outputs={0: {"tp": Shard(-1)}})
    first, second = program.measure_ranks()
    assert [[span.first, span.step] for span in (*first.ranks, *second.ranks)] == [[0, 2], [1, 2]]
    assert (first.parameter_bytes, second.parameter_bytes) == (3 * 4 * FLOAT, 2 * 4 * FLOAT)


def make_graph(function: object, *args: Tensor) -> fx.Graph:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="fake")(*args).graph  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.t(), 0),  # looks at what was given
        (lambda x: (x + 1).t()[0], 64),
        (lambda x: (x + 1) + 1, 128),
        (lambda x: ((x + 1) + 1) + 1, 128),  # the first is gone when the third comes
        (lambda x: (lambda y: (y + 1, y))(x + 1), 128),
        (lambda x: (x + 1).expand(3, 4, 4), 64),
    ],
    ids=["view", "views of one", "two", "three", "two kept", "expanded"],
)
def test_storages_are_counted_and_not_views(function: object, expected: int) -> None:
    footprint = measure(make_graph(function, torch.randn(4, 4)), {})
    assert (footprint.intermediate_bytes, footprint.peak_bytes) == (expected, expected)
    assert (footprint.peak_node is None) == (expected == 0)


def test_gradients_are_counted_separately() -> None:
    graph = make_graph(lambda x: (x + 1, x[0] + 1), torch.randn(4, 4))
    (output,) = graph.find_nodes(op="output")
    gradient = output.args[0][1]
    footprint = measure(graph, {}, gradients=[gradient])
    assert (footprint.gradient_bytes, footprint.intermediate_bytes, footprint.peak_bytes) == (
        16,
        64,
        80,
    )
