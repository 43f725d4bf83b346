"""`World.materialize()`: shapes without data, so that a model of any size costs nothing."""

from __future__ import annotations

import resource

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardscope import simulate, trace
from shardscope.errors import WorldError

GIB = 1024**3


class Block(nn.Module):
    """One layer of an 8B-class model: 4,096 wide, 14,336 in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4096, 14_336, bias=False)
        self.down = nn.Linear(14_336, 4096, bias=False)
        self.register_buffer("scale", torch.ones(4096))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()) * self.scale


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_a_model_of_tens_of_gibibytes_costs_no_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(80)))
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    before = peak_memory()
    with simulate(mesh={"dp": 8}) as world:
        for block in model:
            fully_shard(block, mesh=world.mesh)
        fully_shard(model, mesh=world.mesh)
        world.materialize(model)
        model(torch.ones(2, 4096)).sum().backward()
        grads = [p.grad for p in model.parameters()]
    assert num_bytes > 30 * GIB
    assert peak_memory() - before < GIB
    assert all(isinstance(grad, DTensor) for grad in grads)


def test_parameters_and_buffers_become_fake_tensors_on_the_device() -> None:
    with torch.device("meta"):
        block = Block()
    with simulate(mesh={"dp": 2}) as world:
        assert world.materialize(block) is block
        for tensor in (*block.parameters(), *block.buffers()):
            assert isinstance(tensor.data, FakeTensor)
            assert tensor.device.type == "cpu"
        assert block.up.weight.requires_grad


def test_materializing_twice_changes_nothing() -> None:
    with simulate(mesh={"dp": 2}) as world:
        model = world.materialize(nn.Linear(4, 4, device="meta"))
        parameters = list(model.parameters())
        depth = torch._C._len_torch_dispatch_stack()
        world.materialize(model)
        assert torch._C._len_torch_dispatch_stack() == depth
        assert all(
            before is after for before, after in zip(parameters, model.parameters(), strict=True)
        )


def test_two_models_share_a_world() -> None:
    with simulate(mesh={"dp": 2}) as world:
        with torch.device("meta"):
            student, teacher = nn.Linear(4, 4), nn.Linear(4, 4)
        world.materialize(student)
        world.materialize(teacher)
        loss = (student(torch.ones(2, 4)) - teacher(torch.ones(2, 4))).square().mean()
        loss.backward()
        assert isinstance(loss.data, FakeTensor)
        assert student.weight.grad is not None


def test_tied_parameters_stay_tied() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
        model["head"].weight = model["embed"].weight
    with simulate(mesh={"dp": 2}) as world:
        world.materialize(model)
        assert model["head"].weight is model["embed"].weight


def test_a_model_with_data_is_taken_as_it_is() -> None:
    model = nn.Linear(4, 4)
    weight = model.weight.detach().clone()
    with simulate(mesh={"dp": 2}) as world:
        world.materialize(model)
        assert model(torch.ones(2, 4)).shape == (2, 4)
    assert torch.equal(model.weight, weight)


def test_an_optimizer_steps_on_a_materialized_model() -> None:
    with simulate(mesh={"dp": 4}) as world:
        model = nn.Linear(16, 16, device="meta")
        fully_shard(model, mesh=world.mesh)
        world.materialize(model)
        optimizer = torch.optim.AdamW(model.parameters())
        with trace(model) as t:
            model(torch.ones(2, 16)).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        (state, *_) = optimizer.state.values()
        assert state["exp_avg"].to_local().shape == (4, 16)
    assert [str(c.kind) for c in t.recording.collectives][:2] == ["all_gather", "reduce_scatter"]


def test_ddp_is_refused_with_a_way_out() -> None:
    with simulate(mesh={"dp": 2}) as world:
        model = nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)))
        sentence = r"wrapped in DistributedDataParallel.*run it in the simulated world without"
        with pytest.raises(WorldError, match=sentence):
            world.materialize(model)
        assert type(torch.ones(1)) is torch.Tensor


def test_a_model_that_does_not_know_its_shapes_is_refused_with_a_sentence() -> None:
    with simulate({"dp": 2}) as world, torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
        with pytest.raises(WorldError, match=r"parameter '1\.weight' has no shape yet"):
            world.materialize(model)
