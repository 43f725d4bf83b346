"""Whatever goes wrong in the drop-in for CommDebugMode, the step goes on and a gap says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from shardscope import World, simulate
from shardscope.comm.debug import operations, position, tracker
from shardscope.compat import CommDebugMode
from small_models import Block, batch


@pytest.fixture
def world() -> Iterator[World]:
    with simulate({"dp": 4}) as world:
        yield world


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
def test_step_goes_on(
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


def test_class_that_cannot_be_printed_is_no_problem(world: World) -> None:
    class Unprintable(type):
        def __repr__(cls) -> str:
            raise RuntimeError("no printing")

    class Odd(nn.Linear, metaclass=Unprintable):
        pass

    with CommDebugMode() as mode:
        assert Odd(8, 8)(batch()).shape == (4, 8)
    assert mode.get_total_counts() == 0
