"""The model and torch are left exactly as found."""

from __future__ import annotations

import random
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from older_torch import IS_OLDER
from shardscope import World, trace
from shardscope._torch.collectives.schema import OPS
from small_models import Block, Net, batch, shard_net


def packets() -> list[Any]:
    packets_of_ops = []
    for namespace, table in OPS.items():
        ops = [op for op in table if not IS_OLDER or hasattr(getattr(torch.ops, namespace), op)]
        for op in ops:
            packet = getattr(getattr(torch.ops, namespace), op)
            packets_of_ops += [packet, packet.default]
    return packets_of_ops


def torch_state() -> dict[str, Any]:
    """Whatever of torch a tracer might have had its hands on."""
    return {
        "call": nn.Module.__call__,
        "wrapped call": nn.Module._wrapped_call_impl,
        "module hooks": {
            name: dict(value)
            for name, value in vars(module_hooks).items()
            if name.startswith("_global_") and isinstance(value, dict)
        },
        "kernels": {op: torch._C._dispatch_dump(f"c10d::{op}") for op in OPS["c10d"]},
        "ops": [(id(packet._op), hash(packet)) for packet in packets()],
        "dispatch modes": _get_current_dispatch_mode_stack(),
        "function modes": torch.overrides._get_current_function_mode_stack(),
        "threads": threading.enumerate(),
        "warning filters": list(warnings.filters),
        "random state": (random.getstate(), torch.get_rng_state().tolist()),
        "grad mode": torch.is_grad_enabled(),
        "distributed": {name: value for name, value in vars(dist).items() if callable(value)},
        "group": dict(vars(dist.ProcessGroup)),
        "recursion limit": sys.getrecursionlimit(),
        "trace function": sys.gettrace(),
        "profile function": sys.getprofile(),
    }


def model_state(model: nn.Module) -> list[Any]:
    """Every attribute and hook of every module, and every hook of every parameter."""
    return [
        {
            "class": type(module),
            "attributes": list(vars(module)),
            "hooks": {
                name: dict(value)
                for name, value in vars(module).items()
                if name.endswith("_hooks") and isinstance(value, dict)
            },
            "parameters": [
                (name, id(parameter), parameter._backward_hooks)
                for name, parameter in module.named_parameters(recurse=False)
            ],
        }
        for module in model.modules()
    ]


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name, value in before.items():
        assert after[name] == value, name


def fails(_: object) -> None:
    raise ZeroDivisionError("in the step")


STEPS: dict[str, Callable[[Net], object]] = {
    "nothing": lambda net: None,
    "forward": lambda net: net(batch()),
    "forward and backward": lambda net: net(batch()).sum().backward(),
    "an exception": fails,
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("num_uses", [1, 3])
def test_torch_and_the_model_are_as_before(world: World, name: str, num_uses: int) -> None:
    net = Net()
    net.embed.register_forward_hook(lambda *_: None)
    with trace(net):  # what torch builds on first use is not ours
        net(batch()).sum().backward()
    torch_before, model_before = torch_state(), model_state(net)
    t = trace(net)
    for _ in range(num_uses):
        try:
            with t:
                STEPS[name](net)
        except ZeroDivisionError:
            assert name == "an exception"
    net.zero_grad()
    assert_same(torch_before, torch_state())
    assert model_state(net) == model_before


def test_model_is_untouched_inside_too(world: World) -> None:
    net = Net()
    before = model_state(net)
    with trace(net):
        assert model_state(net) == before
        net(batch()).sum().backward()
        assert model_state(net) == before


def test_ops_hash_and_compare_as_ever_inside() -> None:  # no world, which installs its own hooks
    ops = packets()
    index_of_op = {packet: index for index, packet in enumerate(ops)}
    hashes = [hash(packet) for packet in ops]
    with trace():
        assert [hash(packet) for packet in ops] == hashes
        assert [index_of_op[packet] for packet in packets()] == list(range(len(ops)))


def test_no_dispatch_mode_and_no_thread_is_added(world: World) -> None:
    threads = threading.enumerate()
    with trace(Net()):
        assert _get_current_dispatch_mode_stack() == []
        assert torch.overrides._get_current_function_mode_stack() == []
        assert threading.enumerate() == threads


def test_outside_of_a_world_torch_is_as_before_too() -> None:
    model = nn.Linear(2, 2)
    with trace(model):
        model(torch.ones(2))
    before = torch_state()
    with trace(model):
        model(torch.ones(2))
        inside = torch_state()
    assert_same(before, torch_state())
    changed = {name for name, value in before.items() if inside[name] != value}
    assert changed == {"call", "distributed", "group", "kernels", "ops"}


def train(model: nn.Module, num_steps: int = 3) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, grads = [], []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = nn.functional.dropout(model(torch.rand(4, 8)), 0.5).square().mean()
        loss.backward()
        losses.append(loss.item())
        grads += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return losses, grads


def as_it_is(model: nn.Module, _: World) -> nn.Module:
    return model


def fully_sharded(model: nn.Module, world: World) -> nn.Module:
    return shard_net(model, world.mesh)


@pytest.mark.parametrize("prepare", [as_it_is, fully_sharded])
def test_losses_and_gradients_are_bit_equal(
    world: World, prepare: Callable[[nn.Module, World], nn.Module]
) -> None:
    results = []
    for is_traced in (False, True):
        torch.manual_seed(0)
        net = prepare(Net(), world)
        if is_traced:
            with trace(net) as t:
                results.append(train(net))
        else:
            results.append(train(net))
    (plain_losses, plain_grads), (losses, grads) = results
    assert losses == plain_losses
    assert len(t.recording.collectives) > 0
    assert len(grads) == len(plain_grads) > 0
    for ours, plain in zip(grads, plain_grads, strict=True):
        assert torch.equal(_local(ours), _local(plain))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def test_random_numbers_are_the_same(world: World) -> None:
    net = Net()
    torch.manual_seed(3)
    random.seed(3)
    plain = (torch.rand(3).tolist(), random.random())
    torch.manual_seed(3)
    random.seed(3)
    with trace(net):
        net(batch())
        assert (torch.rand(3).tolist(), random.random()) == plain


def test_a_trace_that_ends_inside_a_module_call_restores_torch(world: World) -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.trace = trace(self.block)
            with self.trace:
                return self.block(x)

    model = Inside()
    call = nn.Module.__call__
    model(batch())
    assert nn.Module.__call__ is call
    assert [c.owner for c in model.trace.recording.collectives] == ["sum"]


def test_another_tools_wrapper_of_module_calls_stays_in_place(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    torchs_own = nn.Module.__call__

    def wrapper(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        called.append(type(module).__name__)
        return torchs_own(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", wrapper)
    model = Block()
    with trace(model) as t:
        model(batch())
    assert nn.Module.__call__ is wrapper
    assert called == ["Block", "Linear", "Sum"]
    assert [call.owner for call in t.recording.collectives] == ["sum"]


def test_wrapper_put_on_inside_the_trace_outlives_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Block()
    with trace(model):
        ours = nn.Module.__call__

        def wrapper(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return ours(module, *args, **kwargs)

        monkeypatch.setattr(nn.Module, "__call__", wrapper)
    assert nn.Module.__call__ is wrapper
    assert model(batch()).shape == (4, 8)
    with trace(model) as t:
        model(batch())
    assert [call.owner for call in t.recording.collectives] == ["sum"]
    assert nn.Module.__call__ is wrapper
    monkeypatch.undo()  # which puts back what they had found, and that was ours
    assert model(batch()).shape == (4, 8)
    with trace(model) as t:
        model(batch())
    assert [call.owner for call in t.recording.collectives] == ["sum"]
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl
