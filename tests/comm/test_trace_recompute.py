"""Activation checkpointing: what is run again has a phase of its own, and its old owner."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from shardscope import World, trace
from shardscope.record import CollectiveKind, Phase
from small_models import MLP, Block, Net, Reduce, batch, facts, shard_net, split_mlp

K = CollectiveKind
FORWARD, BACKWARD, RECOMPUTE = Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE

both_kinds = pytest.mark.parametrize("use_reentrant", [False, True])


def checkpointed(net: Net, **options: Any) -> Net:
    """`net`, whose layers are run again in backward."""

    def run(x: torch.Tensor) -> torch.Tensor:
        x = net.embed(x)
        for layer in net.layers:
            x = checkpoint(layer, x, **options)
        return x

    net.forward = run  # type: ignore[method-assign]
    return net


RECOMPUTED = [
    (FORWARD, "layers.0.sum"),
    (FORWARD, "layers.1.sum"),
    (RECOMPUTE, "layers.1.sum"),
    (BACKWARD, "layers.1.sum"),
    (RECOMPUTE, "layers.0.sum"),
    (BACKWARD, "layers.0.sum"),
]


@both_kinds
@pytest.mark.parametrize("preserve_rng_state", [False, True])
def test_recompute_is_its_own_phase(
    world: World, use_reentrant: bool, preserve_rng_state: bool
) -> None:
    net = checkpointed(Net(), use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state)
    with trace(net) as t:
        net(batch()).sum().backward()
    assert facts(t, "phase", "owner") == RECOMPUTED
    assert t.recording.gaps == ()


@pytest.mark.parametrize("determinism_check", ["default", "none"])
@pytest.mark.parametrize("early_stop", [False, True])
def test_recompute_in_every_variant(world: World, determinism_check: str, early_stop: bool) -> None:
    net = checkpointed(Net(), use_reentrant=False, determinism_check=determinism_check)
    with set_checkpoint_early_stop(early_stop), trace(net) as t:
        net(batch()).sum().backward()
    assert facts(t, "phase", "owner") == RECOMPUTED


def test_recompute_that_stops_early_leaves_the_stack_right(world: World) -> None:
    class TwoSums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()
            self.tail = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tail(self.block(x) + 1) + 1

    net = Net(block=TwoSums)
    checkpointed(net, use_reentrant=False)
    with trace(net) as t:
        net(batch()).sum().backward()
        dist.barrier()
    assert facts(t, "phase", "owner")[-1] == (Phase.OUTSIDE, None)
    assert [owner for phase, owner in facts(t, "phase", "owner") if phase == BACKWARD] == [
        "layers.1.block.sum",
        "layers.0.block.sum",
    ]


Function = Callable[[nn.Module, torch.Tensor], torch.Tensor]

FUNCTIONS: dict[str, Function] = {
    "a child's op is the first in backward": lambda m, y: m.linear(Reduce.apply(y).sin()),
    "its own op is the first in backward": lambda m, y: Reduce.apply(m.linear(y)).sin(),
}


@both_kinds
@pytest.mark.parametrize("name", FUNCTIONS)
def test_checkpointed_function_belongs_to_the_module_that_called_it(
    world: World, use_reentrant: bool, name: str
) -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(partial(FUNCTIONS[name], self), x, use_reentrant=use_reentrant)

    model = nn.Sequential(nn.Linear(8, 8), Calls(), Calls())
    with trace(model) as t:
        model(batch()).sum().backward()
    assert facts(t, "phase", "owner") == [
        (FORWARD, "1"),
        (FORWARD, "2"),
        (RECOMPUTE, "2"),
        (BACKWARD, "2"),
        (RECOMPUTE, "1"),
        (BACKWARD, "1"),
    ]
    assert t.recording.gaps == ()


@both_kinds
def test_shared_module_is_recomputed_at_the_place_that_called_it(
    world: World, use_reentrant: bool
) -> None:
    class Calls(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)

    shared = Block()
    model = nn.Sequential(nn.Linear(8, 8), Calls(shared), Calls(shared))
    with trace(model) as t:
        model(batch()).sum().backward()
    assert facts(t, "phase", "owner") == [
        (FORWARD, "1.inner.sum"),
        (FORWARD, "2.inner.sum"),
        (RECOMPUTE, "2.inner.sum"),
        (BACKWARD, "2.inner.sum"),
        (RECOMPUTE, "1.inner.sum"),
        (BACKWARD, "1.inner.sum"),
    ]


def nested(use_reentrant: bool) -> nn.Module:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, torch.sin(x), use_reentrant=use_reentrant).sin()

    return Net(depth=1, block=Outer)


def test_nested_checkpoints_recompute_once_for_each_level(world: World) -> None:
    net = checkpointed(nested(use_reentrant=False), use_reentrant=False)
    runs = []
    net.layers[0].inner.register_forward_pre_hook(lambda *_: runs.append(1))
    with trace(net) as t:
        net(batch()).sum().backward()
    assert {owner for (owner,) in facts(t, "owner")} == {"layers.0.inner.sum"}
    phases = [phase for (phase,) in facts(t, "phase")]
    assert (phases[0], phases[-1]) == (FORWARD, BACKWARD)
    assert phases[1:-1] == [RECOMPUTE] * (len(runs) - 1)
    assert len(runs) == 3


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_nested_reentrant_checkpoints_keep_their_owner(world: World) -> None:
    net = checkpointed(nested(use_reentrant=True), use_reentrant=True)
    with trace(net) as t:
        net(batch()).sum().backward()
    assert facts(t, "phase", "owner") == [
        (FORWARD, "layers.0.inner.sum"),
        (RECOMPUTE, "layers.0.inner.sum"),
        (RECOMPUTE, "layers.0.inner.sum"),
        (BACKWARD, "layers.0.inner.sum"),
    ]


@pytest.mark.parametrize("implementation", list(CheckpointImpl))
def test_checkpoint_wrapper_adds_no_name(world: World, implementation: CheckpointImpl) -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), checkpoint_wrapper(Block(), checkpoint_impl=implementation)
    )
    with trace(model) as t:
        model(batch()).sum().backward()
    assert facts(t, "phase", "owner") == [
        (FORWARD, "1.sum"),
        (RECOMPUTE, "1.sum"),
        (BACKWARD, "1.sum"),
    ]


def test_checkpointed_sequence_is_recomputed_module_by_module(world: World) -> None:
    model = nn.Sequential(*[Block() for _ in range(4)])
    x = batch().requires_grad_()
    with trace(model) as t:
        checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
    recomputed = [o for phase, o in facts(t, "phase", "owner") if phase == RECOMPUTE]
    assert sorted(recomputed) == ["0.sum", "1.sum"]


@both_kinds
def test_fsdp_gathers_again_in_recompute(world: World, use_reentrant: bool) -> None:
    net = Net()
    for index, layer in enumerate(net.layers):
        wrapper = CheckpointImpl.REENTRANT if use_reentrant else CheckpointImpl.NO_REENTRANT
        net.layers[index] = checkpoint_wrapper(layer, checkpoint_impl=wrapper)
    shard_net(net, world.mesh)
    with trace(net) as t:
        net(batch().requires_grad_()).sum().backward()
    collectives = facts(t, "phase", "kind", "owner")
    assert [o for phase, kind, o in collectives if phase == RECOMPUTE and kind == K.ALL_REDUCE] == [
        "layers.1.sum",
        "layers.0.sum",
    ]
    gathered = [o for phase, kind, o in collectives if phase != FORWARD and kind == K.ALL_GATHER]
    assert "layers.0" in gathered
    assert [o for _, kind, o in collectives if kind == K.REDUCE_SCATTER] == [
        "layers.1",
        "layers.0",
        "",
    ]
    assert t.recording.gaps == ()


@pytest.mark.parametrize("is_saved", [False, True])
def test_collective_whose_result_was_saved_is_not_issued_again(
    world: World, is_saved: bool
) -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = MLP()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(x).sin().sin()

    model = split_mlp(Waves(), world.mesh)
    saved = [torch.ops._c10d_functional.all_reduce.default] if is_saved else []
    contexts = partial(create_selective_checkpoint_contexts, saved)
    with trace(model) as t:
        out = checkpoint(model, batch().requires_grad_(), use_reentrant=False, context_fn=contexts)
        out.sum().backward()
    recomputed = [] if is_saved else [(RECOMPUTE, "mlp.down")]
    assert facts(t, "phase", "owner") == [
        (FORWARD, "mlp.down"),
        *recomputed,
        (BACKWARD, "mlp.up"),
    ]
    assert {source.function for (source,) in facts(t, "source")[:-1]} == {"MLP.forward"}
