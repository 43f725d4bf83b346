"""What programs hold in memory, in figures that can be had by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from shardscope.parallel import Colwise, Replicate, Rowwise, Shard
from shardscope.parallel.footprint import measure
from shardscope.parallel.program import ParallelProgram
from shardscope.parallel.transform import parallelize
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


def cut(
    model: nn.Module, *shape: int, mesh: str = "tp=2", plan: object = None, training: bool = False
) -> ParallelProgram:
    exported = torch.export.export(model, (torch.randn(shape),))
    return parallelize(exported, mesh, plan, training=training, verify=False)


def test_forward_holds_what_is_alive_at_once() -> None:
    held = cut(Pair(), 4, 8, plan=PAIR).memory(0)
    hidden = 4 * 16 * FLOAT
    assert held == RankMemory(
        ranks=held.ranks,
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
    held = cut(Loss(), 4, 8, plan=plan, training=True).memory(0)
    weight, hidden, loss = 8 * 16 * FLOAT, 4 * 16 * FLOAT, FLOAT
    assert held.gradient_bytes == 2 * weight
    # The ReLU's result, its gradient, that gradient's gradient, and the loss.
    assert held.intermediate_bytes == 3 * hidden + loss
    # By then the gradient of `down` is there, that of `up` is not.
    assert held.peak_bytes == 2 * weight + 4 * 8 * FLOAT + held.intermediate_bytes + weight
    assert held.peak_node == "threshold_backward"


def test_two_ranks_hold_the_parameters_of_one_device_between_them() -> None:
    model = Pair()
    whole = sum(one.numel() * FLOAT for one in model.parameters())
    program = cut(model, 4, 8, plan=PAIR)
    assert sum(program.memory(rank).parameter_bytes for rank in (0, 1)) == whole
    alone = cut(model, 4, 8, mesh="tp=1", plan=PAIR)
    assert alone.memory(0).parameter_bytes == whole


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("shift", torch.ones(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.embed(x) * self.scale + self.shift)
        return found


def test_tied_weights_count_once_and_buffers_of_both_kinds_count() -> None:
    exported = torch.export.export(Tied(), (torch.randint(12, (3, 5)),))
    plan = {"embed": Rowwise(), "head": Colwise(output=Replicate())}
    held = parallelize(exported, "tp=2", plan, verify=False).memory(1)
    assert held.parameter_bytes == 6 * 8 * FLOAT
    assert held.buffer_bytes == 2 * 8 * FLOAT
    assert held.input_bytes == 3 * 5 * 8


def test_ranks_that_hold_the_same_share_a_record() -> None:
    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Linear(4, 5, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.only(x)
            return found

    exported = torch.export.export(Uneven(), (torch.randn(2, 4),))
    plan = {"only": Colwise(output=Shard(-1))}
    program = parallelize(exported, "dp=2,tp=2", plan, verify=False, outputs={0: {"tp": Shard(-1)}})
    first, second = program.measure_ranks()
    assert [[one.first, one.step] for one in (*first.ranks, *second.ranks)] == [[0, 2], [1, 2]]
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
    found = measure(make_graph(function, torch.randn(4, 4)), {})
    assert (found.intermediate_bytes, found.peak_bytes) == (expected, expected)
    assert (found.peak_node is None) == (expected == 0)


def test_what_is_kept_is_counted_apart() -> None:
    graph = make_graph(lambda x: (x + 1, x[0] + 1), torch.randn(4, 4))
    (output,) = graph.find_nodes(op="output")
    kept = output.args[0][1]
    found = measure(graph, {}, kept=[kept])
    assert (found.kept_bytes, found.intermediate_bytes, found.peak_bytes) == (16, 64, 80)
