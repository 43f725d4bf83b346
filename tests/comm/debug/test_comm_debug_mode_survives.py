"""Errors in the drop-in for CommDebugMode become gaps, and the step continues."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardscope import World
from shardscope.comm.debug import counts as operations
from shardscope.comm.debug import counts as position
from shardscope.comm.debug import tables as tracker
from shardscope.compat import CommDebugMode
from small_models import Block, batch


def broken(*_: Any, **__: Any) -> NoReturn:
    raise LookupError("torch moved it")


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (position.Positions, "current"),
        (position.Positions, "running"),
        (tracker.ModuleTracker, "_add"),
        (tracker.ModuleTracker, "_add_parameters"),
        (tracker.ModuleTracker, "enclosing"),
        (operations.OperationLists, "add"),
    ],
)
def test_a_failing_recorder_does_not_stop_the_step(
    world: World, monkeypatch: pytest.MonkeyPatch, holder: type, name: str
) -> None:
    model = Block()
    expected = model(batch())
    monkeypatch.setattr(holder, name, broken)
    with CommDebugMode() as mode:
        out = model(batch())
        out.sum().backward()
    assert torch.equal(out, expected)
    assert model.linear.weight.grad is not None
    assert any("torch moved it" in gap.fact for gap in mode.gaps)


def test_a_class_whose_repr_raises_does_not_stop_the_step(world: World) -> None:
    class Unprintable(type):
        def __repr__(cls) -> str:
            raise RuntimeError("no printing")

    class Odd(nn.Linear, metaclass=Unprintable):
        pass

    with CommDebugMode() as mode:
        assert Odd(8, 8)(batch()).shape == (4, 8)
    assert mode.get_total_counts() == 0


def test_leaving_without_entering_does_no_harm(world: World) -> None:
    mode = CommDebugMode()
    mode.__exit__(None, None, None)
    with mode:
        Block()(batch())
    assert mode.get_total_counts() == 1


def test_counts_may_be_assigned(world: World) -> None:
    with CommDebugMode() as mode:
        Block()(batch())
        mode.comm_counts = {}
        mode.comm_module_counts = {}
        mode.comm_module_operation_counts = {}
    assert mode.get_total_counts() == 0
    assert mode.get_comm_module_counts() == {}


def test_op_taken_out_of_the_registry_is_not_counted(world: World) -> None:
    mode = CommDebugMode()
    mode.comm_registry.discard(torch.ops._c10d_functional.all_reduce)
    with mode:
        Block()(batch())
        dist.barrier()
    assert mode.get_comm_counts() == {torch.ops.c10d.barrier: 1}


def test_every_module_called_has_a_list_of_ops(world: World) -> None:
    with CommDebugMode() as mode:
        nn.Sequential(nn.Identity())(batch())
    lists = mode.comm_module_operation_counts
    assert lists["Sequential"] == lists["Sequential.0"] == {"operations_list": []}
