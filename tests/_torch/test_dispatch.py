"""Canaries for what dispatch modes, recomputing and torch.compile keep to themselves."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.wrap import wrap
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from shardscope._torch.dispatch import (
    TorchDispatchMode,
    has_fakes,
    is_higher_order,
    op_packet,
    without_modes,
)
from shardscope._torch.recompute import find_recomputed, method_owner, reentrant_nodes
from shardscope._torch.uncompiled import keep_uncompiled


class Listing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_ops_know_their_packet_and_higher_order_ones_are_told_apart() -> None:
    assert op_packet(torch.ops.aten.add.Tensor) is torch.ops.aten.add
    assert is_higher_order(wrap)
    assert not is_higher_order(torch.ops.aten.add.Tensor)


def test_fake_tensors_are_noticed() -> None:
    real = torch.ones(2)
    assert not has_fakes((real,))
    with FakeTensorMode() as mode:
        fake = torch.ones(2)
        assert has_fakes((real,))
    assert has_fakes((fake,))
    assert mode is not None


def test_modes_see_nothing_while_off() -> None:
    with Listing() as mode:
        with without_modes():
            torch.ones(2).add(1)
        torch.ones(2)
    assert mode.ops == [torch.ops.aten.ones.default]


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.seen: list[nn.Module | None] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(method_owner(find_recomputed(sys._getframe())))
        return x.sin()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_method_is_found_while_it_is_recomputed(use_reentrant: bool) -> None:
    model = Checkpointed(use_reentrant)
    model(torch.ones(2, requires_grad=True)).sum().backward()
    assert model.seen == [None, model]


def test_reentrant_checkpoint_is_found_from_its_inner_backward() -> None:
    found: list[str] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        if y.requires_grad:
            y.register_hook(
                lambda _: found.extend(n.name() for n in reentrant_nodes(sys._getframe()))
            )
        return y * 2

    checkpoint(inner, torch.ones(2, requires_grad=True), use_reentrant=True).sum().backward()
    assert found == ["CheckpointFunctionBackward"]


def test_code_kept_uncompiled_is_run_as_it_is_with_all_it_calls() -> None:
    def called(x: torch.Tensor) -> torch.Tensor:
        return x.sin() if torch.compiler.is_compiling() else x.cos()

    def kept(x: torch.Tensor) -> torch.Tensor:
        return called(x)

    keep_uncompiled(kept.__code__)
    x = torch.ones(2)
    torch._dynamo.utils.counters.clear()
    assert torch.compile(kept, backend="eager")(x).equal(x.cos())
    assert not torch._dynamo.utils.counters["frames"]
    torch._dynamo.reset()
