"""What the step was doing: forward, backward, recompute, optimizer, or nothing of these."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shardscope import Trace, World, load, trace
from shardscope.record import Call, CollectiveKind, Phase
from small_models import Block, Net, batch, facts, gap_facts, shard_net

K = CollectiveKind
FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD


def test_gradient_clipping_is_outside_and_names_its_op(world: World) -> None:
    net = shard_net(Net(), world.mesh)
    with trace(net) as t:
        net(batch()).sum().backward()
        before = len(t.recording.collectives)
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # the norm is still partial here
    (call,) = t.recording.collectives[before:]
    assert (call.phase, call.owner, call.trigger) == (Phase.OUTSIDE, None, None)
    assert call.kind == K.ALL_REDUCE
    assert call.cause.before == ("NormPartial(2.0)",)
    assert call.cause.after == ("Replicate",)
    assert call.cause.asked_by.startswith("aten.")
    assert call.cause.is_implicit
    assert call.source.text.startswith("norm = nn.utils.clip_grad_norm_(net.parameters()")
    assert norm is not None


class Reducing(torch.optim.SGD):
    """An optimizer of the user's own that averages before it steps."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                dist.all_reduce(parameter.grad)
        return super().step(closure)


class FromScratch(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        dist.barrier()


@pytest.mark.parametrize("make", [lambda p: Reducing(p, lr=0.1), FromScratch])
def test_optimizer_step_is_its_own_phase(
    world: World, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    model = nn.Linear(8, 8, bias=False)
    optimizer = make(model.parameters())
    with trace(model) as t:
        model(batch()).sum().backward()
        optimizer.step()
    assert facts(t, "phase", "owner") == [(Phase.OPTIMIZER, None)]


def test_fused_dtensor_optimizer_is_the_optimizer_phase(world: World) -> None:
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=world.mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: dist.barrier())
    with trace(model) as t:
        model(batch()).sum().backward()
        optimizer.step()
    assert facts(t, "kind", "phase")[-1] == (K.BARRIER, Phase.OPTIMIZER)


def test_optimizer_inside_backward_is_the_optimizer_phase(world: World) -> None:
    model = nn.Linear(8, 8, bias=False)
    optimizer = Reducing(model.parameters(), lr=0.1)

    def step(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    model.weight.register_post_accumulate_grad_hook(step)
    with trace(model) as t:
        model(batch()).sum().backward()
    assert facts(t, "phase", "owner") == [(Phase.OPTIMIZER, None)]


def test_closure_of_an_optimizer_has_its_own_phases(world: World) -> None:
    model = Block()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch()).sum()
        loss.backward()
        return loss

    with trace(model) as t:
        optimizer.step(closure)
    assert facts(t, "phase", "owner")[:2] == [(FORWARD, "sum"), (BACKWARD, "sum")]


def test_backward_inside_forward_is_backward(world: World) -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(self.block(x).sum(), x)
            return grad

    model = Penalised()
    with trace(model) as t:
        model(batch())
    assert facts(t, "phase", "owner") == [(FORWARD, "block.sum"), (BACKWARD, "block.sum")]


def test_before_between_and_after_are_outside(world: World) -> None:
    model = Block()
    with trace(model) as t:
        dist.barrier()
        loss = model(batch()).sum()
        dist.barrier()
        loss.backward()
        dist.barrier()
    assert facts(t, "kind", "phase", "owner") == [
        (K.BARRIER, Phase.OUTSIDE, None),
        (K.ALL_REDUCE, FORWARD, "sum"),
        (K.BARRIER, Phase.OUTSIDE, None),
        (K.ALL_REDUCE, BACKWARD, "sum"),
        (K.BARRIER, Phase.OUTSIDE, None),
    ]
    assert {cause for kind, cause in facts(t, "kind", "cause") if kind == K.BARRIER} == {
        Call(api="torch.distributed.barrier")
    }


def test_microbatches_in_any_order_keep_their_owners(world: World) -> None:
    net = Net()
    with trace(net) as t:
        losses = [net(batch()).sum() for _ in range(3)]
        losses[1].backward()
        losses.append(net(batch()).sum())
        for index in (3, 0, 2):
            losses[index].backward()
    forward = [owner for phase, owner in facts(t, "phase", "owner") if phase == FORWARD]
    backward = [owner for phase, owner in facts(t, "phase", "owner") if phase == BACKWARD]
    assert forward == ["layers.0.sum", "layers.1.sum"] * 4
    assert backward == ["layers.1.sum", "layers.0.sum"] * 4


def recorded_backward(net: nn.Module, loss: torch.Tensor) -> Trace:
    with trace(net) as t:
        loss.backward()
    return t


def test_backward_of_an_unwatched_forward_is_recorded_with_a_gap(world: World) -> None:
    net = Net()
    t = recorded_backward(net, net(batch()).sum())
    assert facts(t, "phase", "owner") == [(BACKWARD, None), (BACKWARD, None)]
    assert gap_facts(t) == [
        "its forward ran before the trace began, or on another thread outside any module, so "
        "collectives that only autograd could attribute have no module"
    ]


def test_fsdp_owners_are_known_though_its_forward_was_not_watched(world: World) -> None:
    net = shard_net(Net(block=lambda: nn.Linear(8, 8)), world.mesh)
    t = recorded_backward(net, net(batch()).sum())
    reductions = [o for kind, o in facts(t, "kind", "owner") if kind == K.REDUCE_SCATTER]
    assert reductions == ["layers.1", "layers.0", ""]


def test_forward_between_two_uses_of_a_trace_is_a_gap(world: World) -> None:
    net = Net(depth=1)
    with trace(net) as t:
        net(batch())
    loss = net(batch()).sum()
    with t:
        loss.backward()
    assert facts(t, "phase", "owner") == [(FORWARD, "layers.0.sum"), (BACKWARD, None)]
    assert "its forward ran before the trace began" in gap_facts(t)[0]


@pytest.mark.parametrize("number", [1, 3])
def test_forward_passes_are_counted(world: World, tmp_path: Path, number: int) -> None:
    model, loss = DistributedDataParallel(Net(depth=1)), nn.MSELoss()
    with trace(model, stream=tmp_path / "run.jsonl") as t:
        for _ in range(number):
            loss(model(batch()), batch()).backward()
    assert t.recording.run.num_forwards == number
    assert load(tmp_path / "run.jsonl") == t.recording


def test_recomputed_forwards_and_those_within_others_are_not_counted(world: World) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    model = Checkpointed()
    with trace(model) as t:
        for _ in range(2):
            model(torch.ones(2, 8, requires_grad=True)).sum().backward()
    assert t.recording.run.num_forwards == 2


def test_without_a_module_call_forward_passes_are_not_known(world: World) -> None:
    with trace() as t:
        dist.barrier()
    assert t.recording.run.num_forwards is None
