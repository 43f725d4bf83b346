"""`compat.CommDebugMode` where torch's own crashes, miscounts or charges the wrong module."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from comm_debug_counts import ALL_REDUCE, counts
from shardscope import World
from shardscope.compat import CommDebugMode
from small_models import Block, Net, Reduce, batch, shard_net

c10d = torch.ops.c10d


def test_modules_may_run_many_times(world: World) -> None:
    net = Net()
    with CommDebugMode() as mode:
        for _ in range(3):  # microbatches
            net(batch()).sum().backward()
    expected = {
        "Global": 6,
        "Net": 6,
        "Net.layers.0": 3,
        "Net.layers.0.sum": 3,
        "Net.layers.1": 3,
        "Net.layers.1.sum": 3,
    }
    assert counts(mode, "forward") == counts(mode, "backward") == expected
    assert mode.advanced_module_tracker.parent_dict["Net"] == [
        "Net.embed",
        "Net.layers.0",
        "Net.layers.1",
    ]


def test_backward_of_interleaved_microbatches_is_charged_to_its_modules(world: World) -> None:
    net = Net()
    with CommDebugMode() as mode:
        losses = [net(batch()).sum() for _ in range(2)]
        for loss in losses:
            loss.backward()
    assert counts(mode, "backward")["Net.layers.0.sum"] == 2
    assert counts(mode, "backward")["Net.layers.1.sum"] == 2


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = Block()
        self.first = nn.Sequential(shared)
        self.second = nn.Sequential(shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_shared_module_is_charged_under_each_of_its_names(world: World) -> None:
    model = Twice()
    with CommDebugMode() as mode:
        model(batch()).sum().backward()
    expected = {
        "Global": 2,
        "Twice": 2,
        "Twice.first": 1,
        "Twice.first.0": 1,
        "Twice.first.0.sum": 1,
        "Twice.second": 1,
        "Twice.second.0": 1,
        "Twice.second.0.sum": 1,
    }
    assert counts(mode, "forward") == counts(mode, "backward") == expected


def test_models_of_the_same_class_have_different_names(world: World) -> None:
    first, second = Net(depth=1), Net(depth=2)
    with CommDebugMode() as mode:
        second(first(batch())).sum().backward()
    for direction in ("forward", "backward"):
        assert counts(mode, direction)["Net"] == 1
        assert counts(mode, direction)["Net#2"] == 2
        assert counts(mode, direction)["Global"] == 3


def run_checkpointed(use_reentrant: bool) -> Callable[[Net, torch.Tensor], torch.Tensor]:
    def run(net: Net, x: torch.Tensor) -> torch.Tensor:
        x = net.embed(x)
        for layer in net.layers:
            x = checkpoint(layer, x, use_reentrant=use_reentrant)
        return x

    return run


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recompute_is_charged_to_what_is_recomputed(world: World, use_reentrant: bool) -> None:
    net = Net()
    net.forward = run_checkpointed(use_reentrant).__get__(net)  # type: ignore[method-assign]
    with CommDebugMode() as mode:
        net(batch()).sum().backward()
    assert counts(mode, "forward")["Net.layers.0.sum"] == 1
    assert counts(mode, "backward") == {
        "Global": 4,
        "Net": 4,
        "Net.layers.0": 2,
        "Net.layers.0.sum": 2,
        "Net.layers.1": 2,
        "Net.layers.1.sum": 2,
    }


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_ops_are_listed_as_checkpointing(world: World, use_reentrant: bool) -> None:
    net = Net()
    net.forward = run_checkpointed(use_reentrant).__get__(net)  # type: ignore[method-assign]
    with CommDebugMode() as mode:
        net(batch()).sum().backward()
    operations = mode.comm_module_operation_counts["Net.layers.0.linear"]["operations_list"]
    ran = [
        (op["is_bw"], op["is_activation_checkpointing"])
        for op in operations
        if op["name"] is torch.ops.aten.addmm.default
    ]
    assert ran == [(False, False), (True, True)]
    matmuls = [op for op in operations if op["name"] is torch.ops.aten.mm.default]
    assert {(op["is_bw"], op["is_activation_checkpointing"]) for op in matmuls} == {(True, False)}
    table = mode.generate_comm_debug_tracing_table()
    section = table.split("Net.layers.0.linear\n")[1].split("Net.layers.0.sum\n")[0]
    assert "ACTIVATION CHECKPOINTING" in section


class WithMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(Reduce.apply(torch.sin(x)))

    use_reentrant = False


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_method_belongs_to_its_module(world: World, use_reentrant: bool) -> None:
    model = WithMethod()
    model.use_reentrant = use_reentrant
    with CommDebugMode() as mode:
        model(batch().requires_grad_()).sum().backward()
    assert counts(mode, "backward") == {"Global": 2, "WithMethod": 2}
    operations = mode.comm_module_operation_counts["WithMethod"]["operations_list"]
    sines = [op for op in operations if op["name"] is torch.ops.aten.sin.default]
    assert [op["is_activation_checkpointing"] for op in sines] == [False, True]


def test_checkpoint_wrapper_shows_in_names_as_in_torch(world: World) -> None:
    model = nn.Sequential(checkpoint_wrapper(Block()))
    with CommDebugMode() as mode:
        model(batch()).sum().backward()
    inner = "Sequential.0._checkpoint_wrapped_module"
    assert counts(mode, "forward")[f"{inner}.sum"] == 1
    assert counts(mode, "backward") == {
        "Global": 2,
        "Sequential": 2,
        "Sequential.0": 2,
        inner: 2,
        f"{inner}.sum": 2,
    }


def test_collectives_after_backward_belong_to_no_module(world: World) -> None:
    net = Net()
    fully_shard(net, mesh=world.mesh)
    with CommDebugMode() as mode:
        net(batch()).sum().backward()
        before = dict(mode.comm_module_counts["FSDPNet"]["forward"])
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        assert mode.advanced_module_tracker.name == "Global"
    assert mode.comm_module_counts["FSDPNet"]["forward"] == before
    assert mode.comm_module_counts["Global"]["forward"][ALL_REDUCE] == before[ALL_REDUCE] + 1


def test_optimizer_collectives_belong_to_no_module(world: World) -> None:
    class Reducing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            dist.all_reduce(torch.ones(1))
            return super().step(closure)

    net = Net()
    optimizer = Reducing(net.parameters(), lr=0.1)
    with CommDebugMode() as mode:
        net(batch()).sum().backward()
        optimizer.step()
    assert counts(mode, "forward", c10d.allreduce_) == {"Global": 1}


def test_forward_may_run_outside(world: World) -> None:
    loss = Net()(batch()).sum()
    with CommDebugMode() as mode:
        loss.backward()
    assert counts(mode, "backward") == {"Global": 2}
    assert "forward ran before" in mode.gaps[0].fact
    mode.generate_comm_debug_tracing_table()


def test_fully_sharded_modules_own_their_gathers_and_reductions(world: World) -> None:
    net = shard_net(Net(), world.mesh)
    with CommDebugMode() as mode:
        net(batch()).sum().backward()
    gathers, reductions = c10d._allgather_base_, c10d._reduce_scatter_base_
    assert counts(mode, "forward", gathers) == {
        "Global": 3,
        "FSDPNet": 3,
        "FSDPNet.layers.0": 1,
        "FSDPNet.layers.1": 1,
    }
    assert counts(mode, "backward", gathers)["FSDPNet.layers.0"] == 1
    assert counts(mode, "backward", reductions) == {
        "Global": 3,
        "FSDPNet": 3,
        "FSDPNet.layers.0": 1,
        "FSDPNet.layers.1": 1,
    }
    listed = mode.comm_module_operation_counts["FSDPNet.layers.0"]["operations_list"]
    assert [op["is_bw"] for op in listed if op["name"] is gathers.default] == [False, True]


def test_sharding_is_known_while_fsdp_has_parameters_gathered(world: World) -> None:
    net = shard_net(Net(), world.mesh)
    with CommDebugMode() as mode:
        net(batch())
    expected = {f"FSDPNet.{name}": (Shard(0),) for name, _ in net.named_parameters()}
    assert mode.get_sharding_info() == expected
    assert len(expected) == 6
    weight = mode.get_parameter_info()["FSDPNet.layers.0.linear"]["weight"]
    assert weight.to_local().shape == (2, 8)
    helper = mode.advanced_module_tracker.module_helper_dict["FSDPNet.layers.0.linear"]
    assert helper["parameters"]["weight"] == "(Shard(dim=0),)"


def test_fully_sharded_forward_may_run_outside(world: World) -> None:
    net = shard_net(Net(), world.mesh)
    loss = net(batch()).sum()
    with CommDebugMode() as mode:
        loss.backward()
    reductions = counts(mode, "backward", c10d._reduce_scatter_base_)
    assert reductions == {
        "Global": 3,
        "FSDPNet": 3,
        "FSDPNet.layers.0": 1,
        "FSDPNet.layers.1": 1,
    }
    assert "FSDPNet.layers.1" in mode.generate_comm_debug_tracing_table(0)


def test_prefetched_module_is_charged_and_shown_under_its_parent(world: World) -> None:
    net = shard_net(Net(), world.mesh)
    net.layers[0].set_modules_to_forward_prefetch([net.layers[1]])
    with CommDebugMode() as mode:
        net(batch())
    assert counts(mode, "forward", c10d._allgather_base_)["FSDPNet.layers.1"] == 1
    shown = [line.strip() for line in mode.generate_module_tracing_table().splitlines()]
    names = [line for line in shown if line.startswith("FSDPNet.layers")]
    assert names == [
        f"FSDPNet.layers.{i}{part}" for i in range(2) for part in ("", ".linear", ".sum")
    ]


def test_model_with_mixed_parallelism_is_charged_by_module(world: World) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(net, world.mesh, plan)
    with CommDebugMode() as mode, warnings.catch_warnings():
        warnings.simplefilter("error")  # none of our hooks warn
        for _ in range(2):
            net(batch().requires_grad_()).sum().backward()
    assert counts(mode, "forward") == {"Global": 2, "Sequential": 2, "Sequential.1": 2}
    assert counts(mode, "backward") == {"Global": 2, "Sequential": 2, "Sequential.0": 2}
