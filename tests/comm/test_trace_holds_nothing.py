"""Nothing of a step is held on to, and ordinary ops leave nothing behind."""

from __future__ import annotations

import gc
import tracemalloc
import weakref

import torch
import torch.distributed as dist
from torch import nn

from shardscope import World, trace
from small_models import MLP, Net, Reduce, batch, facts, shard_net, split_mlp


class ReferencingModel(nn.Module):
    """Remembers its activations, weakly."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = split_mlp(MLP(), dist.device_mesh.init_device_mesh("cpu", (4,)))
        self.references: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = Reduce.apply(self.inner(x) * 2)
        dist.all_reduce(hidden.detach())
        out = hidden * 3
        self.references += [weakref.ref(hidden), weakref.ref(out)]
        out.register_hook(lambda grad: self.references.append(weakref.ref(grad)))
        return out


def test_activations_and_gradients_die_while_the_trace_is_open(world: World) -> None:
    model = ReferencingModel()
    with trace(model) as t:
        model(batch().requires_grad_()).sum().backward()
        model.zero_grad()
        gc.collect()
        assert len(model.references) == 3
        assert [reference() for reference in model.references] == [None] * 3
        assert len(t.recording.collectives) > 0


def test_models_die_while_the_trace_is_open(world: World) -> None:
    with trace() as t:
        net = Net()
        net(batch()).sum().backward()
        reference = weakref.ref(net)
        del net
        gc.collect()
        assert reference() is None
    assert t.recording.collectives[0].owner == "Net.layers.0.sum"


def test_traces_die_when_they_are_dropped(world: World) -> None:
    net = Net()
    t = trace(net)
    with t:
        net(batch())
    reference = weakref.ref(t)
    del t
    gc.collect()
    assert reference() is None


def retained_by(num_ops: int) -> int:
    """Bytes that are held after so many ordinary ops in one module, and were not before."""
    x = torch.ones(4, requires_grad=True)

    class Many(nn.Module):
        def forward(self, y: torch.Tensor) -> torch.Tensor:
            for _ in range(num_ops):
                y = y * 1.5
            return y

    model = Many()
    with trace(model):
        model(x).sum().backward()
        gc.collect()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            model(x).sum().backward()
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    return after - before


def test_nothing_is_retained_per_ordinary_op(world: World) -> None:
    # What other threads and caches of torch's take meanwhile comes and goes; an op's would stay.
    grown = min(retained_by(1000) - retained_by(1) for _ in range(3))
    assert grown < 1000  # less than a byte an op


def test_sharded_models_die_while_the_trace_is_open(world: World) -> None:
    net = shard_net(Net(depth=1), world.mesh)
    with trace(net) as t:
        net(batch()).sum().backward()
        reference = weakref.ref(net)
        del net
        gc.collect()
        assert reference() is None
        owners = {owner for owner, kind in facts(t, "owner", "kind") if kind == "all_gather"}
    assert owners == {"", "layers.0"}
