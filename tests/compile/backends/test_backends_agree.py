"""Every debugging backend computes what the function computes, by name and by itself."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from backend_cases import run
from shardscope.compile import backends


class Functions(TorchFunctionMode):
    """Lets everything pass."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Ops(TorchDispatchMode):
    """Lets everything pass."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


OPTIONS: dict[str, dict[str, Any]] = {
    "eager_with_modes": {"modes": [Functions]},
    "aot_eager_decomp_partition_with_mode": {"mode": Ops},
}
NAMES = [name for name in backends.__all__ if name[0].islower() and not name.startswith("fault_")]


@pytest.mark.parametrize("has_grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", [*NAMES, "ts"])
def test_by_name(name: str, has_grad: bool) -> None:
    expected = run(None, has_grad=has_grad)
    ran = run(f"shardscope_{name}", OPTIONS.get(name), has_grad=has_grad)
    torch.testing.assert_close(tuple(ran), tuple(expected))


@pytest.mark.parametrize("name", NAMES)
def test_by_itself_on_a_graph_traced_by_fx(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    gm = torch.fx.symbolic_trace(lambda x, w, b: (torch.relu(x @ w.T + b),))
    inputs = [torch.randn(2, 4), model[0].weight.detach(), model[0].bias.detach()]
    compiled = getattr(backends, name)(gm, inputs, options=OPTIONS.get(name))
    (output,) = compiled(*inputs)
    torch.testing.assert_close(output, model(inputs[0]).detach())


@pytest.mark.parametrize(
    "name",
    ["pre_dispatch_eager", "torchscript", "aot_eager", "aot_eager_decomp_partition", "aot_ts"],
)
def test_sizes_that_change_and_buffers_that_are_written(name: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())

    model, expected = make(), make()
    torch.compiler.reset()
    compiled = torch.compile(model, backend=f"shardscope_{name}", dynamic=True)
    for size in (3, 5):
        x = torch.randn(size, 4)
        torch.testing.assert_close(compiled(x), expected(x))
    torch.testing.assert_close(model.state_dict(), expected.state_dict())


def test_every_entry_point_is_a_backend_of_ours() -> None:
    ours = [
        point
        for point in entry_points(group="torch_dynamo_backends")
        if point.name.startswith("shardscope_")
    ]
    loaded = {point.name.removeprefix("shardscope_"): point.load() for point in ours}
    assert loaded.pop("ts") is backends.torchscript
    assert loaded == {name: getattr(backends, name) for name in backends.__all__ if name in loaded}
    assert len(loaded) == len([name for name in backends.__all__ if name[0].islower()])


def test_the_graph_given_stays_as_it_was() -> None:
    gm = torch.fx.symbolic_trace(lambda x: (torch.relu(x),))
    code = gm.code
    inputs = [torch.randn(2)]
    for name in NAMES:
        getattr(backends, name)(gm, inputs, options=OPTIONS.get(name))
    backends.fault_nan(gm, inputs, options={"op": "relu"})
    assert gm.code == code
    assert isinstance(gm(inputs[0])[0], Tensor)
