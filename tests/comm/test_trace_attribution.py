"""Collectives belong to the module that issued them, in forward and backward."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardscope import Trace, World, simulate, trace
from shardscope.record import CollectiveKind, Phase
from small_models import MLP, Block, Net, Own, Reduce, batch, facts, shard_net, split_mlp

K = CollectiveKind
FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD


def owners(t: Trace, phase: Phase, kind: CollectiveKind | None = None) -> list[str | None]:
    return [
        call.owner
        for call in t.recording.collectives
        if call.phase == phase and (kind is None or call.kind == kind)
    ]


def test_each_layer_owns_its_collectives_forwards_and_backwards(world: World) -> None:
    net = Net()
    with trace(net) as t:
        net(batch()).sum().backward()
    assert facts(t, "phase", "owner", "trigger") == [
        (FORWARD, "layers.0.sum", "layers.0.sum"),
        (FORWARD, "layers.1.sum", "layers.1.sum"),
        (BACKWARD, "layers.1.sum", "layers.1.sum"),
        (BACKWARD, "layers.0.sum", "layers.0.sum"),
    ]
    assert t.recording.gaps == ()


def test_block_owns_what_it_issues_after_its_child_has_run(world: World) -> None:
    net = Net(block=Own)
    with trace(net) as t:
        net(batch()).sum().backward()
    assert owners(t, FORWARD) == ["layers.0", "layers.1"]
    assert owners(t, BACKWARD) == ["layers.1", "layers.0"]


def test_root_owns_what_runs_between_its_children(world: World) -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.second = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(Reduce.apply(self.first(x)))

    model = Between()
    with trace(model) as t:
        model(batch()).sum().backward()
    assert facts(t, "phase", "owner") == [(FORWARD, ""), (BACKWARD, "")]


def test_collectives_outside_of_any_module_have_no_owner(world: World) -> None:
    model = nn.Linear(8, 8)
    with trace(model) as t:
        Reduce.apply(model(batch())).sum().backward()
    assert facts(t, "phase", "owner") == [(Phase.OUTSIDE, None), (BACKWARD, None)]
    assert t.recording.gaps == ()


def test_tensor_parallel_layers_own_their_all_reduces(world: World) -> None:
    model = split_mlp(nn.Sequential(MLP(), MLP()), world.mesh)
    with trace(model) as t:
        model(batch().requires_grad_()).sum().backward()
    assert facts(t, "phase", "kind", "owner", "axis", "input_bytes") == [
        (FORWARD, K.ALL_REDUCE, "0.down", "dp", 128),
        (FORWARD, K.ALL_REDUCE, "1.down", "dp", 128),
        (BACKWARD, K.ALL_REDUCE, "1.up", "dp", 128),
        (BACKWARD, K.ALL_REDUCE, "0.up", "dp", 128),
    ]
    assert t.recording.gaps == ()


def test_sequence_parallel_layers_own_their_gathers_and_scatters(world: World) -> None:
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.mlp = MLP()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(self.norm(x))

    model = Parallel()
    parallelize_module(
        model,
        world.mesh,
        {
            "norm": SequenceParallel(),
            "mlp": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        },
    )
    with trace(model) as t:
        model(torch.ones(2, 4, 8, requires_grad=True)).sum().backward()
    forward = [
        (kind, owner)
        for phase, kind, owner in facts(t, "phase", "kind", "owner")
        if phase == FORWARD
    ]
    assert forward == [(K.ALL_GATHER, "mlp"), (K.REDUCE_SCATTER, "mlp.down")]
    backward = [
        (kind, owner)
        for phase, kind, owner in facts(t, "phase", "kind", "owner")
        if phase == BACKWARD
    ]
    assert (K.ALL_GATHER, "mlp.down") in backward
    assert (K.REDUCE_SCATTER, "mlp") in backward


def test_fully_sharded_blocks_own_their_gathers_and_reductions(world: World) -> None:
    net = shard_net(Net(block=lambda: nn.Linear(8, 8)), world.mesh)
    with trace(net) as t:
        net(batch()).sum().backward()
    assert owners(t, FORWARD, K.ALL_GATHER) == ["", "layers.0", "layers.1"]
    assert owners(t, BACKWARD, K.REDUCE_SCATTER) == ["layers.1", "layers.0", ""]
    # The last layer stays gathered; the first is gathered again while the last runs backward.
    gathers = [
        (owner, trigger)
        for phase, kind, owner, trigger in facts(t, "phase", "kind", "owner", "trigger")
        if phase == BACKWARD and kind == K.ALL_GATHER
    ]
    assert ("layers.0", "layers.1") in gathers
    assert {axis for (axis,) in facts(t, "axis")} == {"dp"}
    assert t.recording.gaps == ()


def test_prefetched_block_owns_its_gather_and_the_running_one_triggers_it(world: World) -> None:
    net = shard_net(Net(depth=3), world.mesh)
    net.layers[0].set_modules_to_forward_prefetch([net.layers[1]])
    with trace(net) as t:
        net(batch())
    gathers = [
        (owner, trigger)
        for kind, owner, trigger in facts(t, "kind", "owner", "trigger")
        if kind == K.ALL_GATHER
    ]
    assert gathers == [
        ("", ""),
        ("layers.0", "layers.0"),
        ("layers.1", "layers.0"),
        ("layers.2", "layers.2"),
    ]


def test_hybrid_sharding_names_both_axes() -> None:
    with simulate({"replica": 2, "shard": 4}, rank=3) as world:
        net = shard_net(Net(depth=1, block=lambda: nn.Linear(8, 8)), world.mesh)
        with trace(net) as t:
            net(batch()).sum().backward()
    backward = [
        (kind, axis, owner, cause.action)
        for phase, kind, axis, owner, cause in facts(t, "phase", "kind", "axis", "owner", "cause")
        if phase == BACKWARD and kind != K.ALL_GATHER
    ]
    assert backward == [
        (K.REDUCE_SCATTER, "shard", "layers.0", "reduce"),
        (K.ALL_REDUCE, "replica", "layers.0", "all_reduce"),
        (K.REDUCE_SCATTER, "shard", "", "reduce"),
        (K.ALL_REDUCE, "replica", "", "all_reduce"),
    ]


# torch warns of a module that returns a view, as a tensor-parallel one does.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_fsdp_and_tensor_parallelism_name_their_own_axes() -> None:
    with simulate({"dp": 2, "tp": 4}, rank=6) as world:
        model = split_mlp(nn.Sequential(MLP(), MLP()), world.mesh["tp"])
        for mlp in model:
            fully_shard(mlp, mesh=world.mesh["dp"])
        with trace(model) as t:
            model(batch().requires_grad_()).sum().backward()
    counted = Counter(facts(t, "phase", "kind", "axis", "owner"))
    assert counted[FORWARD, K.ALL_REDUCE, "tp", "0.down"] == 1
    assert counted[BACKWARD, K.ALL_REDUCE, "tp", "0.up"] == 1
    assert counted[FORWARD, K.ALL_GATHER, "dp", "0"] == 1
    assert counted[BACKWARD, K.REDUCE_SCATTER, "dp", "1"] == 1
    assert t.recording.gaps == ()


# torch advises against it, and people still have it.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_first_generation_fsdp_owns_its_gathers_and_reductions(world: World) -> None:
    net = Net(block=lambda: nn.Linear(8, 8))
    for index, layer in enumerate(net.layers):
        net.layers[index] = FullyShardedDataParallel(layer, device_id=torch.device("cpu"))
    model = FullyShardedDataParallel(net, device_id=torch.device("cpu"))
    with trace(model) as t:
        model(batch()).sum().backward()
    assert owners(t, FORWARD, K.ALL_GATHER) == ["", "layers.0", "layers.1"]
    assert owners(t, BACKWARD, K.REDUCE_SCATTER) == ["layers.1", "layers.0", ""]
    assert {cause.action for (cause,) in facts(t, "cause")} == {"unshard", "reduce"}


def test_fake_model_is_attributed_like_a_real_one(world: World) -> None:
    with torch.device("meta"):
        net = Net(block=MLP)
    split_mlp(net, world.mesh)
    world.materialize(net)
    with trace(net) as t:
        net(batch()).sum().backward()
    assert facts(t, "phase", "owner") == [
        (FORWARD, "layers.0.down"),
        (FORWARD, "layers.1.down"),
        (BACKWARD, "layers.1.up"),
        (BACKWARD, "layers.0.up"),
    ]


def test_fake_fsdp_model_is_attributed_like_a_real_one(world: World) -> None:
    with torch.device("meta"):
        net = Net()
    shard_net(net, world.mesh)
    world.materialize(net)
    with trace(net) as t:
        net(batch()).sum().backward()
    assert isinstance(net, FSDPModule)
    assert owners(t, FORWARD, K.ALL_GATHER) == ["", "layers.0", "layers.1"]
    assert owners(t, BACKWARD, K.REDUCE_SCATTER) == ["layers.1", "layers.0", ""]
    assert owners(t, BACKWARD, K.ALL_REDUCE) == ["layers.1.sum", "layers.0.sum"]


def test_hooks_of_a_module_belong_to_it(world: World) -> None:
    net = Net(depth=1)
    net.embed.register_forward_pre_hook(lambda *_: dist.barrier())
    net.embed.register_forward_hook(lambda *_: dist.barrier())
    net.embed.register_full_backward_hook(lambda *_: dist.barrier())
    net.embed.weight.register_hook(lambda grad: dist.barrier())
    net.embed.weight.register_post_accumulate_grad_hook(lambda parameter: dist.barrier())
    with trace(net) as t:
        net(batch().requires_grad_()).sum().backward()
    barriers = [
        (phase, owner)
        for kind, phase, owner in facts(t, "kind", "phase", "owner")
        if kind == K.BARRIER
    ]
    assert barriers[:2] == [(FORWARD, "embed"), (FORWARD, "embed")]
    assert barriers[2:] == [(BACKWARD, "embed")] * 3


def test_source_line_is_the_users_own_not_torchs(world: World) -> None:
    model = split_mlp(MLP(), world.mesh)
    with trace(model) as t:
        out = model(batch().requires_grad_())  # forward line
        out.sum().backward()  # backward line
    forward, backward = t.recording.collectives
    assert forward.source.text == "return self.down(torch.relu(self.up(x)))"
    assert forward.source.function == "MLP.forward"
    assert backward.source.text == "out.sum().backward()  # backward line"


def test_source_line_of_a_custom_function_is_its_backward(world: World) -> None:
    block = Block()
    with trace(block) as t:
        block(batch()).sum().backward()
    lines = [source.function for (source,) in facts(t, "source")]
    assert lines == ["Reduce.forward", "Reduce.backward"]
