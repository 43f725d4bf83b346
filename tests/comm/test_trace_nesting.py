"""Traces may be nested, repeated, and left by an exception from anywhere; what was seen is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardscope import World, simulate, trace
from shardscope._torch.collectives.events import OBSERVERS
from shardscope.errors import CollectiveError
from shardscope.record import Gap
from small_models import Block, Net, Reduce, batch, everyone, facts


def test_two_traces_each_see_everything_inside_them(world: World) -> None:
    net = Net(depth=1)
    with trace(net) as outer:
        net(batch())
        with trace({"net": net}) as inner:
            net(batch()).sum().backward()
        net(batch())
    assert facts(outer, "phase", "owner") == [
        ("forward", "layers.0.sum"),
        ("forward", "layers.0.sum"),
        ("backward", "layers.0.sum"),
        ("forward", "layers.0.sum"),
    ]
    assert facts(inner, "phase", "owner") == [
        ("forward", "net.layers.0.sum"),
        ("backward", "net.layers.0.sum"),
    ]
    assert [order for (order,) in facts(inner, "order")] == [0, 1]
    assert (outer.recording.gaps, inner.recording.gaps) == ((), ())


def test_same_trace_within_itself_counts_once(world: World) -> None:
    net = Net(depth=1)
    t = trace(net)
    with t, t:
        net(batch())
    with t:
        with t:
            pass
        net(batch())
    assert facts(t, "phase", "owner") == [("forward", "layers.0.sum")] * 2


def test_entering_again_continues_the_recording(world: World) -> None:
    net = Net(depth=1)
    t = trace(net)
    for num_steps in range(1, 4):
        with t:
            net(batch()).sum().backward()
        assert len(t.recording.collectives) == 2 * num_steps
    assert [order for (order,) in facts(t, "order")] == list(range(6))
    assert [order for (order,) in facts(t, "group_order")] == list(range(6))
    assert {owner for (owner,) in facts(t, "owner")} == {"layers.0.sum"}


def test_what_happens_between_two_uses_is_not_recorded(world: World) -> None:
    t = trace()
    with t:
        dist.barrier()
    dist.all_reduce(torch.ones(1))
    with t:
        dist.barrier()
    assert [kind for (kind,) in facts(t, "kind")] == ["barrier", "barrier"]


def test_recording_can_be_read_while_the_trace_runs(world: World) -> None:
    net = Net(depth=1)
    with trace(net) as t:
        for num_steps in range(1, 4):
            net(batch())
            assert len(t.recording.collectives) == num_steps
        first = t.recording
    assert first == t.recording


def test_traces_may_end_in_the_order_they_began(world: World) -> None:
    first, second = trace(), trace()
    call = nn.Module.__call__
    first.__enter__()
    second.__enter__()
    dist.barrier()
    first.__exit__(None, None, None)
    dist.barrier()
    second.__exit__(None, None, None)
    dist.barrier()
    assert (len(first.recording.collectives), len(second.recording.collectives)) == (1, 2)
    assert nn.Module.__call__ is call


def test_traces_can_follow_one_another_through_several_worlds() -> None:
    sizes = []
    for rank, size in ((1, 2), (5, 8)):
        with simulate({"dp": size}, rank=rank), trace() as t:
            dist.barrier()
        sizes.append(facts(t, "rank", "num_ranks", "group"))
    assert sizes == [[(1, 2, "dp[0-1]")], [(5, 8, "dp[0-7]")]]


class Failing(nn.Module):
    """Fails at `where`, after a collective of its own."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x)
        if self.where == "forward":
            raise ZeroDivisionError("in forward")
        if self.where == "collective":
            dist.broadcast(x, src=99, group=everyone())
        return Fails.apply(x) if self.where == "backward" else x


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Reduce.backward(ctx, grad)
        raise ZeroDivisionError("in backward")


def raise_in_hook(*_: object) -> None:
    raise ZeroDivisionError("in hook")


def forward_hook(model: Failing) -> None:
    model.block.register_forward_hook(raise_in_hook)


def backward_hook(model: Failing) -> None:
    model.block.linear.weight.register_hook(raise_in_hook)


class FailingOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        dist.barrier()
        raise ZeroDivisionError("in optimizer")


def train(model: nn.Module) -> None:
    model(batch()).sum().backward()
    FailingOptimizer(model.parameters(), lr=0.1).step()


FAILURES: dict[str, tuple[str, Callable[[Failing], None] | None, list[str]]] = {
    # where it fails, what to prepare, the phases recorded up to there
    "forward": ("in forward", None, ["forward"]),
    "forward hook": ("in hook", forward_hook, ["forward"]),
    "backward": ("in backward", None, ["forward", "backward"]),
    "backward hook": ("in hook", backward_hook, ["forward", "backward"]),
    "optimizer": ("in optimizer", None, ["forward", "backward", "optimizer"]),
}


@pytest.mark.parametrize("where", FAILURES)
def test_exception_keeps_the_recording_and_is_named_in_a_gap(world: World, where: str) -> None:
    message, prepare, phases = FAILURES[where]
    model = Failing(where)
    if prepare is not None:
        prepare(model)
    call = nn.Module.__call__
    with pytest.raises(ZeroDivisionError, match=message), trace(model) as t:
        train(model)
    assert [phase for (phase,) in facts(t, "phase")] == phases
    assert t.recording.gaps == (
        Gap(place="step", fact=f"it ended early with ZeroDivisionError: {message}", rank=0),
    )
    assert nn.Module.__call__ is call
    assert len(OBSERVERS.current[0]) == 1  # the world's own


def test_exception_in_a_collective_is_named_in_a_gap(world: World) -> None:
    model = Failing("collective")
    with pytest.raises(CollectiveError), trace(model) as t:
        model(batch())
    assert "ended early with CollectiveError" in t.recording.gaps[0].fact
    # The refused one was never issued.
    assert [kind for (kind,) in facts(t, "kind")] == ["all_reduce"]


@pytest.mark.parametrize("where", FAILURES)
def test_trace_after_a_failed_step_starts_afresh(world: World, where: str) -> None:
    message, prepare, _ = FAILURES[where]
    broken = Failing(where)
    if prepare is not None:
        prepare(broken)
    model = Block()
    with trace() as t:
        with pytest.raises(ZeroDivisionError, match=message):
            train(broken)
        before = len(t.recording.collectives)
        dist.barrier()
        model(batch()).sum().backward()
    assert facts(t, "phase", "owner")[before:] == [
        ("outside", None),
        ("forward", "Block.sum"),
        ("backward", "Block.sum"),
    ]


def test_collectives_are_recorded_after_a_reentrant_kernel_failed(world: World) -> None:
    with trace() as t:
        with pytest.raises(RuntimeError):
            torch.ops._c10d_functional.all_reduce(torch.ones(4), "nonsense", everyone().group_name)
        dist.barrier()
    assert facts(t, "kind")[-1] == ("barrier",)


def test_keyboard_interrupt_keeps_the_recording(world: World) -> None:
    def interrupt() -> None:
        dist.barrier()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), trace() as t:
        interrupt()
    assert len(t.recording.collectives) == 1
    assert t.recording.gaps[0].fact == "it ended early with KeyboardInterrupt"


def test_thread_still_running_at_the_end_is_left_alone(world: World) -> None:
    go, done = threading.Event(), threading.Event()

    def work() -> None:
        go.wait(10)
        Block()(batch())
        done.set()

    worker = threading.Thread(target=work)
    with trace() as t:
        worker.start()
    go.set()
    worker.join(10)
    assert done.is_set()
    assert t.recording.collectives == ()
