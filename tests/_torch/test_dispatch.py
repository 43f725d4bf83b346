"""Canaries for private behaviour of dispatch modes, recomputation and torch.compile."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.wrap import wrap
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from shardscope._torch.autograd import find_recomputed, method_owner, reentrant_nodes
from shardscope._torch.dispatch import (
    TorchDispatchMode,
    disable_dispatch_modes,
    has_fake_tensors,
    is_higher_order,
    op_packet,
)
from shardscope._torch.skip_dynamo import skip_dynamo


class OpLog(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_op_packet_and_is_higher_order() -> None:
    assert op_packet(torch.ops.aten.add.Tensor) is torch.ops.aten.add
    assert is_higher_order(wrap)
    assert not is_higher_order(torch.ops.aten.add.Tensor)


def test_has_fake_tensors_detects_arguments_and_modes() -> None:
    real = torch.ones(2)
    assert not has_fake_tensors((real,))
    with FakeTensorMode() as mode:
        fake = torch.ones(2)
        assert has_fake_tensors((real,))
    assert has_fake_tensors((fake,))
    assert mode is not None


def test_disabled_dispatch_modes_see_no_ops() -> None:
    with OpLog() as mode:
        with disable_dispatch_modes():
            torch.ones(2).add(1)
        torch.ones(2)
    assert mode.ops == [torch.ops.aten.ones.default]


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.owners: list[nn.Module | None] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.run, x, use_reentrant=self.use_reentrant)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        self.owners.append(method_owner(find_recomputed(sys._getframe())))
        return x.sin()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_find_recomputed_returns_the_method_during_recomputation(use_reentrant: bool) -> None:
    model = Checkpointed(use_reentrant)
    model(torch.ones(2, requires_grad=True)).sum().backward()
    assert model.owners == [None, model]


def test_reentrant_nodes_finds_the_checkpoint_in_its_inner_backward() -> None:
    names: list[str] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        if y.requires_grad:
            y.register_hook(
                lambda _: names.extend(n.name() for n in reentrant_nodes(sys._getframe()))
            )
        return y * 2

    checkpoint(run, torch.ones(2, requires_grad=True), use_reentrant=True).sum().backward()
    assert names == ["CheckpointFunctionBackward"]


def test_skip_dynamo_runs_code_and_its_callees_eagerly() -> None:
    def callee(x: torch.Tensor) -> torch.Tensor:
        return x.sin() if torch.compiler.is_compiling() else x.cos()

    def skipped(x: torch.Tensor) -> torch.Tensor:
        return callee(x)

    skip_dynamo(skipped.__code__)
    x = torch.ones(2)
    torch._dynamo.utils.counters.clear()
    assert torch.compile(skipped, backend="eager")(x).equal(x.cos())
    assert not torch._dynamo.utils.counters["frames"]
    torch._dynamo.reset()
