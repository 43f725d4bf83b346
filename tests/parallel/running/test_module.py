"""A rank's module is called as the model was, and lives as any module does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from parallel_cases.alone import mesh_of_one
from shardscope.errors import ParallelError
from shardscope.parallel import Colwise, Rowwise, Shard
from shardscope.parallel.api import parallelize

PAIR = {"up": Colwise(), "down": Rowwise()}
PLAN = {**PAIR, "step": Colwise()}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x)))
        return out


class Many(nn.Module):
    """Takes and returns nests, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(4, 4)  # as a method of the module is called
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(
        self, x: Tensor, flag: bool = True, scale: float = 2.0, *, more: dict[str, Tensor]
    ) -> dict[str, Any]:
        before = self.calls.clone()
        self.calls = self.calls + 1
        out = self.step(x) * scale * self.table + more["b"] - more["a"]
        return {"out": [out, None], "flag": flag, "before": before}


def alone(model: nn.Module, *args: Any, inputs: Any = None, **kwargs: Any) -> Any:
    """On a mesh of one rank: what the module returns is what the model does."""
    plan = {name: style for name, style in PLAN.items() if hasattr(model, name)}
    program = parallelize(
        model, mesh_of_one("tp"), plan, args=args, kwargs=kwargs, inputs=inputs, verify=False
    )
    return program.module()


def make_more() -> dict[str, Tensor]:
    return {"a": torch.ones(2, 4), "b": torch.full((2, 4), 3.0)}


def test_nested_inputs_and_outputs_have_the_models_structure() -> None:
    model, x = Many(), torch.randn(2, 4)
    module = alone(copy.deepcopy(model), x, more=make_more())
    expected, actual = model(x, more=make_more()), module(x, more=make_more())
    assert actual["out"][1] is None
    assert actual["flag"] is True
    assert torch.equal(actual["out"][0], expected["out"][0])


def test_keys_may_come_in_another_order() -> None:
    x, more = torch.randn(2, 4), make_more()
    module = alone(Many(), x, more=more)
    turned = dict(reversed(more.items()))
    assert torch.equal(module(x, more=turned)["out"][0], module(x, more=more)["out"][0])


def test_buffers_change_and_what_was_returned_of_them_does_not() -> None:
    x = torch.randn(2, 4)
    module = alone(Many(), x, more=make_more())
    before = [module(x, more=make_more())["before"] for _ in range(3)]
    assert [float(output) for output in before] == [0.0, 1.0, 2.0]
    assert float(module.calls) == 3.0


def test_inputs_that_the_model_changes_are_changed() -> None:
    class Changing(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            y.add_(x)
            return y * 2

    inputs = {"x": {"tp": Shard(0)}, "y": {"tp": Shard(0)}}
    module = alone(Changing(), torch.ones(2), torch.ones(2), inputs=inputs)
    y = torch.full((2,), 5.0)
    assert module(torch.ones(2), y).tolist() == [12.0, 12.0]
    assert y.tolist() == [6.0, 6.0]


def test_arguments_by_name_are_the_same_arguments() -> None:
    x = torch.randn(2, 4)
    module = alone(Many(), x, True, 3.0, more=make_more())
    expected = module(x, True, 3.0, more=make_more())["out"][0]
    named = module(scale=3.0, flag=True, x=x, more=make_more())["out"][0]
    assert torch.equal(expected, named)


@pytest.mark.parametrize(
    ("args", "kwargs", "sentence"),
    [
        ((torch.ones(2, 4),), {}, r"takes \(x, flag, more=\) and was given \(…\)"),
        ((torch.ones(2, 4), True, 3.0), {"more": make_more()}, "and was given"),
        ((torch.ones(2, 4), True), {"less": make_more()}, "and was given"),
        ((torch.ones(2, 4), False), {"more": make_more()}, "flag is False, and .* with True"),
        ((torch.ones(2, 4), 1), {"more": make_more()}, "flag is 1, and .* with True"),
        ((torch.ones(3, 4), True), {"more": make_more()}, r"x is \[3, 4\] and .* takes \[2, 4\]"),
        ((torch.ones(4), True), {"more": make_more()}, r"x is \[4\] and .* takes \[2, 4\]"),
        ((torch.ones(2, 4).double(), True), {"more": make_more()}, "x is torch.float64, and"),
        ((None, True), {"more": make_more()}, "x is NoneType, and"),
        ((torch.ones(2, 4), True), {"more": {"a": torch.ones(2, 4)}}, "nested differently"),
        ((torch.ones(2, 4), True), {"more": [torch.ones(2, 4)] * 2}, "nested differently"),
        (
            (torch.ones(2, 4), True),
            {"more": {**make_more(), "c": torch.ones(1)}},
            "nested differently",
        ),
    ],
)
def test_other_inputs_than_the_program_was_made_for_are_refused(
    args: Any, kwargs: Any, sentence: str
) -> None:
    module = alone(Many(), torch.ones(2, 4), True, more=make_more())
    with pytest.raises(ParallelError, match=sentence):
        module(*args, **kwargs)


class Pair(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y.sum(-1, keepdim=True)


def open_pair() -> Any:
    batch = Dim("batch", min=2, max=8)
    return parallelize(
        Pair(),
        "dp=2",
        {},
        args=(torch.ones(4, 3), torch.ones(4, 5)),
        dynamic_shapes={"x": {0: 2 * batch}, "y": {0: 2 * batch}},
        inputs={"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}},
        outputs={0: {"dp": Shard(0)}},
        verify=False,
    ).module(0)


@pytest.mark.parametrize("size", [2, 5, 8])
def test_dynamic_sizes_may_differ(size: int) -> None:
    assert open_pair()(torch.ones(size, 3), torch.ones(size, 5)).shape == (size, 3)


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [((4, 6), "y has 6 along dim 0, .* sizes of x"), ((9, 9), r"x is \[9, 3\]"), ((1, 1), "takes")],
)
def test_dynamic_sizes_have_limits(sizes: tuple[int, int], sentence: str) -> None:
    with pytest.raises(ParallelError, match=sentence):
        open_pair()(torch.ones(sizes[0], 3), torch.ones(sizes[1], 5))


def test_a_rank_takes_its_shard_and_not_the_full_tensor() -> None:
    program = parallelize(
        Mlp(), "dp=2", {}, args=(torch.ones(4, 4),), inputs={"x": {"dp": Shard(0)}}
    )
    assert program.module(1)(torch.ones(2, 4)).shape == (2, 4)
    with pytest.raises(ParallelError, match="Give this rank's shard"):
        program.module(1)(torch.ones(4, 4))


def test_its_state_is_the_ranks_shards_under_the_models_names() -> None:
    model = Mlp()
    module = parallelize(model, "tp=2", PAIR, args=(torch.ones(2, 4),), verify=False).module(1)
    state = module.state_dict()
    assert list(state) == list(model.state_dict())
    assert torch.equal(state["up.weight"], model.up.weight[4:])
    assert [name for name, _ in module.named_parameters()] == list(state)


def test_buffers_that_are_not_saved_are_not() -> None:
    module = alone(Many(), torch.ones(2, 4), more=make_more())
    assert sorted(module.state_dict()) == ["calls", "step.bias", "step.weight"]
    assert sorted(dict(module.named_buffers())) == ["calls", "table"]


@pytest.mark.parametrize("assign", [False, True])
def test_it_computes_with_what_is_loaded(assign: bool) -> None:
    model, x = Mlp(), torch.randn(2, 4)
    module = alone(Mlp(), x)
    module.load_state_dict(model.state_dict(), assign=assign)
    assert torch.equal(module(x), model(x))


def test_it_computes_where_it_is_moved() -> None:
    module = alone(Many(), torch.ones(2, 4), more=make_more()).to("meta")
    more = {name: tensor.to("meta") for name, tensor in make_more().items()}
    assert module(torch.ones(2, 4, device="meta"), more=more)["out"][0].is_meta
    assert module.calls.is_meta


def test_a_copy_has_a_state_of_its_own() -> None:
    x = torch.randn(2, 4)
    module = alone(Mlp(), x)
    before = module(x)
    copied = copy.deepcopy(module)
    with torch.no_grad():
        copied.down.bias += 1
    assert torch.equal(module(x), before)
    assert torch.allclose(copied(x), before + 1)


def test_it_has_no_gradients() -> None:
    assert not alone(Mlp(), torch.ones(2, 4))(torch.ones(2, 4)).requires_grad


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_compiles_without_graph_breaks(backend: str) -> None:
    x = torch.randn(2, 4)
    module = alone(Mlp(), x)
    with torch.no_grad():
        compiled = torch.compile(module, backend=backend, fullgraph=True)
        assert torch.allclose(compiled(x), module(x))
    torch.compiler.reset()


def test_it_runs_under_the_hooks_of_modules() -> None:
    x = torch.randn(2, 4)
    module = alone(Mlp(), x)
    module.register_forward_hook(lambda _module, _args, output: output + 1)
    assert torch.equal(module(x), alone_again(module, x) + 1)


def alone_again(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = module.forward(x)
    return out
