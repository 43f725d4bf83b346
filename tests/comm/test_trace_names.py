"""Modules have the user's names without wrappers; a shared module's calls follow their caller."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardscope import Trace, World, trace
from shardscope.attribution.module_names import NO_MODULE, ModuleNames
from shardscope.errors import TraceError
from shardscope.record import FullyShard
from small_models import MLP, Block, Net, Own, batch, facts, split_mlp


def owners(t: Trace) -> list[str | None]:
    return [owner for (owner,) in facts(t, "owner")]


def test_module_run_twice_is_charged_twice(world: World) -> None:
    block = Block()
    model = nn.Sequential(block, nn.ReLU())
    with trace(model) as t:
        model(model(batch())).sum().backward()
    assert owners(t) == ["0.sum"] * 4


class Twice(nn.Module):
    """A block under three names, two of them below other modules."""

    def __init__(self) -> None:
        super().__init__()
        shared = Own()
        self.first = nn.Sequential(shared)
        self.second = nn.Sequential(shared)
        self.head = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)))


def test_shared_module_is_charged_to_the_place_that_called_it(world: World) -> None:
    model = Twice()
    with trace(model) as t:
        model(batch()).sum().backward()
    assert owners(t) == ["first.0", "second.0", "head", "head", "second.0", "first.0"]


def test_shared_module_is_listed_once_with_its_other_names(world: World) -> None:
    model = Twice()
    with trace(model) as t:
        pass
    listed = {module.name: module for module in t.recording.modules}
    assert list(listed) == ["", "first", "first.0", "first.0.linear", "second"]
    assert listed["first.0"].aliases == ("second.0", "head")
    assert listed["first.0.linear"].aliases == ("second.0.linear", "head.linear")


def test_models_without_names_are_named_by_class(world: World) -> None:
    first, second = Net(depth=1), Net(depth=1)
    with trace() as t:
        second(first(batch())).sum().backward()
    assert owners(t) == [
        "Net.layers.0.sum",
        "Net#2.layers.0.sum",
        "Net#2.layers.0.sum",
        "Net.layers.0.sum",
    ]
    names = {module.name: module.type for module in t.recording.modules}
    assert (names["Net"], names["Net#2"], names["Net#2.layers.0"]) == ("Net", "Net", "Block")


def test_list_of_models_is_named_by_position(world: World) -> None:
    models = [Block(), Block()]
    with trace(models) as t:
        models[1](models[0](batch()))
    assert owners(t) == ["0.sum", "1.sum"]


def test_dict_of_models_is_named_by_its_keys(world: World) -> None:
    models = {"student": Block(), "teacher": Block()}
    with trace(models) as t:
        models["teacher"](batch())
        models["student"](batch())
    assert owners(t) == ["teacher.sum", "student.sum"]


def test_names_given_win_over_those_of_a_module_that_holds_them(world: World) -> None:
    class Distiller(nn.Module):
        def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
            super().__init__()
            self.a, self.b, self.c = student, teacher, Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.a(x) - self.b(x))

    models = {"student": Block(), "teacher": Block()}
    distiller = Distiller(**models)
    with trace(models) as t:
        distiller(batch())
    assert owners(t) == ["student.sum", "teacher.sum", "Distiller.c.sum"]


def test_part_of_a_model_keeps_the_names_given_to_it(world: World) -> None:
    net = Net()
    with trace(net.layers[0]) as t:
        net(batch())
    assert owners(t) == ["sum", "Net.layers.1.sum"]


@pytest.mark.parametrize("is_wrapped_before", [True, False])
def test_data_parallel_wrapper_adds_no_name(world: World, is_wrapped_before: bool) -> None:
    net = Net(depth=1)
    wrapped = DistributedDataParallel(net)
    with trace(wrapped if is_wrapped_before else net) as t:
        wrapped(batch())
    assert owners(t)[-1] == "layers.0.sum"
    assert {module.name.split(".")[0] for module in t.recording.modules} == {"", "embed", "layers"}


def test_compiled_module_adds_no_name(world: World) -> None:
    net = Net(depth=1)
    compiled = torch.compile(net, backend="eager")
    net.layers[0].forward = torch._dynamo.disable(net.layers[0].forward)
    with trace(net) as t:
        compiled(batch())
    assert owners(t) == ["layers.0.sum"]


def test_wrapper_put_around_a_module_later_adds_no_name(world: World) -> None:
    net = Net(depth=1)
    with trace(net) as t:
        net.layers[0] = checkpoint_wrapper(net.layers[0])
        net(batch())
    assert owners(t) == ["layers.0.sum"]


def test_module_registered_later_has_its_place_as_name(world: World) -> None:
    net = Net(depth=1)
    with trace(net) as t:
        net.layers.append(Block())
        net.embed = nn.Sequential(net.embed, Own())
        net(batch())
    assert owners(t) == ["embed.1", "layers.0.sum", "layers.1.sum"]


def test_fully_sharded_part_called_alone_is_named_within_the_full_model(world: World) -> None:
    net = Net(depth=1)
    fully_shard(net.layers[0], mesh=world.mesh)
    fully_shard(net, mesh=world.mesh)
    with trace() as t:
        net(batch())
    sharded = [o for o, cause in facts(t, "owner", "cause") if isinstance(cause, FullyShard)]
    assert sharded == ["Net", "Net.layers.0"]


def test_clean_types_and_parameters_with_placements(world: World) -> None:
    model = split_mlp(nn.Sequential(MLP(), nn.Linear(8, 8)), world.mesh)
    fully_shard(model[1], mesh=world.mesh)
    with trace(model) as t:
        model(batch())
    listed = {module.name: module for module in t.recording.modules}
    assert {name: module.type for name, module in listed.items()} == {
        "": "Sequential",
        "0": "MLP",
        "0.up": "Linear",
        "0.down": "Linear",
        "1": "Linear",
    }
    (weight,) = listed["0.up"].parameters
    assert (weight.name, weight.shape, weight.local_shape) == ("weight", (32, 8), (8, 8))
    assert (weight.placements, weight.axes, weight.dtype) == (("Shard(0)",), ("dp",), "float32")
    assert listed["0.down"].parameters[0].placements == ("Shard(1)",)
    sharded = {p.name: (p.shape, p.local_shape, p.placements) for p in listed["1"].parameters}
    assert sharded == {
        "weight": ((8, 8), (2, 8), ("Shard(0)",)),
        "bias": ((8,), (2,), ("Shard(0)",)),
    }


def test_tied_weights_belong_to_the_first_that_holds_them(world: World) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(8, 8, bias=False)
            self.head = nn.Linear(8, 8, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x))

    model = Tied()
    model.head.weight.register_post_accumulate_grad_hook(lambda _: dist.barrier())
    with trace(model) as t:
        model(batch()).sum().backward()
    assert owners(t) == ["embed"]
    assert [m.parameters[0].name for m in t.recording.modules[1:]] == ["weight", "weight"]


def test_module_made_in_forward_gets_one_name_however_often(world: World) -> None:
    class Makes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Own()(x)

    model = Makes()
    with trace(model) as t:
        for _ in range(5):
            model(batch())
            gc.collect()
    assert owners(t) == ["Own"] * 5


def test_deleted_model_and_a_new_one_at_its_address_have_different_names(world: World) -> None:
    with trace() as t:
        for _ in range(3):
            model = Own()
            model(batch())
            del model
            gc.collect()
    assert owners(t) == ["Own", "Own#2", "Own#3"]


def test_module_at_the_address_of_a_dead_one_has_its_own_name() -> None:
    for _ in range(100):  # whether an address is used again is up to the allocator
        names = ModuleNames(None)
        dead = nn.ReLU()
        address, first = id(dead), names.find(dead)
        del dead
        modules = [nn.ReLU() for _ in range(1_000)]
        born = next((module for module in modules if id(module) == address), None)
        if born is not None:
            break
    assert born is not None
    assert names.names[names.find(born)] == "ReLU#2"
    assert names.names[first] == "ReLU"


def test_parameter_at_the_address_of_a_dead_one_has_its_own_name() -> None:
    names = ModuleNames({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)})
    gc.collect()
    modules = [nn.Linear(2, 2) for _ in range(20)]  # some of them where the dead ones were
    for index, module in enumerate(modules):
        assert names.owner_of(module.weight) == NO_MODULE
        index_of_name = names.find(module)
        assert names.owner_of(module.weight) == index_of_name
        number = f"#{index + 1}" if index else ""
        assert names.parameter_name(module.bias) == f"Linear{number}.bias"


def test_dead_modules_are_not_kept_alive(world: World) -> None:
    model = Net(depth=1)
    names = ModuleNames(model)
    (index,) = [i for i, name in enumerate(names.names) if name == "layers.0"]
    assert names.module(index) is model.layers[0]
    del model
    gc.collect()
    assert names.module(index) is None
    assert list(names.roots()) == []


@pytest.mark.parametrize(
    ("models", "found"),
    [
        (42, "int"),
        ("model", "str"),
        ([nn.ReLU(), 3], "int"),
        ({"a": None}, "NoneType"),
        (torch.ones(2), "Tensor"),
        (nn.ReLU, "type"),
    ],
)
def test_what_is_no_model_is_refused_with_a_sentence(models: Any, found: str) -> None:
    with pytest.raises(TraceError) as caught:
        trace(models)
    assert str(caught.value) == (
        f"trace() got {found} instead of a module. Give a model, a list of models or a dict "
        "from name to model, or nothing to follow every module called."
    )


def test_name_that_is_no_string_is_refused_with_a_sentence() -> None:
    with pytest.raises(TraceError) as caught:
        trace({1: nn.ReLU()})  # type: ignore[dict-item]
    assert str(caught.value) == (
        "trace() got a dict of models with the key 1. Give strings as names: "
        "they become prefixes of the module names."
    )


def test_recording_before_entering_is_refused_with_a_sentence() -> None:
    with pytest.raises(TraceError, match="Run the step inside the context"):
        _ = trace(nn.ReLU()).recording
