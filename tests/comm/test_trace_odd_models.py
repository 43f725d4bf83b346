"""Models as people really build them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from shardscope import Trace, World, simulate, trace
from small_models import MLP, Block, Net, Own, Reduce, Sum, batch, facts, split_mlp

T = TypeVar("T")


def run(model: nn.Module) -> Trace:
    with trace(model) as t:
        out = model(batch().requires_grad_())
        out.sum().backward()
    assert t.recording.gaps == ()
    return t


def owners(t: Trace) -> list[str | None]:
    return [owner for (owner,) in facts(t, "owner")]


@dataclass
class Output:
    logits: torch.Tensor
    hidden: list[torch.Tensor]


class Structured(nn.Module):
    """Takes and gives dicts, dataclasses and keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner({"x": x}, scale=2)
        assert isinstance(out, Output)
        return out.logits + out.hidden[0]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sum = Sum()

    def forward(self, inputs: dict[str, torch.Tensor], *, scale: int) -> Output:
        hidden = self.sum(inputs["x"] * scale)
        return Output(logits=hidden * 2, hidden=[hidden])


def test_structured_inputs_and_outputs_keep_their_owners(world: World) -> None:
    assert owners(run(Structured())) == ["inner.sum", "inner.sum"]


def test_modules_without_parameters_own_collectives(world: World) -> None:
    assert owners(run(nn.Sequential(nn.ReLU(), Sum(), nn.Tanh()))) == ["1", "1"]


def test_layers_called_in_odd_order_are_charged_as_called(world: World) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Own() for _ in range(3))
            self.named = nn.ModuleDict({"extra": Own()})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in (*reversed(self.layers), self.layers[2], self.named["extra"]):
                x = layer(x)
            return x

    forward = ["layers.2", "layers.1", "layers.0", "layers.2", "named.extra"]
    assert owners(run(Odd())) == forward + forward[::-1]


def test_module_that_calls_itself_owns_every_level(world: World) -> None:
    class Recursive(nn.Module):
        def forward(self, x: torch.Tensor, depth: int = 3) -> torch.Tensor:
            if depth == 0:
                return x
            return Reduce.apply(self(x * 2, depth - 1))

    model = nn.Sequential(Recursive())
    assert owners(run(model)) == ["0"] * 6


def test_calling_forward_directly_charges_the_module_that_did(world: World) -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Own()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner.forward(x)

    assert owners(run(Direct())) == ["", ""]


def nest(depth: int) -> nn.Module:
    model: nn.Module = Own()
    for _ in range(depth):
        model = nn.Sequential(model)
    return model


def call_in_thread(function: Callable[[], T]) -> T:
    """Call on a new thread, whose stack is as deep as Python allows.

    That of the test's own thread may be less deep: torch 2.11 on Python 3.12 uses up part of it
    whenever it fails to compile a function.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_two_hundred_levels_deep() -> None:
    def run_deep_model() -> Trace:
        with simulate({"dp": 4}, device="cpu"):
            return run(nest(200))

    t = call_in_thread(run_deep_model)
    assert owners(t) == [".".join(["0"] * 200)] * 2
    assert len(t.recording.modules) == 202


def reduce_at_depth(depth: int) -> None:
    if depth:
        reduce_at_depth(depth - 1)
    else:
        dist.all_reduce(torch.ones(1))


def test_a_collective_at_the_end_of_the_stack_is_a_gap_and_no_error() -> None:
    """At some depths, torch can issue a collective and the recorder cannot describe it."""

    def run_at_every_depth() -> list[Trace]:
        with simulate({"dp": 4}, device="cpu"):
            traces = []
            for depth in itertools.count(sys.getrecursionlimit() - 150):
                with trace() as t:
                    try:
                        reduce_at_depth(depth)
                    except RecursionError:
                        return traces
                traces.append(t)
        raise AssertionError("the stack has no end")

    traces = call_in_thread(run_at_every_depth)
    for t in traces:
        is_recorded = len(t.recording.collectives) == 1 and not t.recording.gaps
        assert is_recorded or "call stack" in t.recording.gaps[0].fact
        assert is_recorded or t.recording.gaps[0].is_loss
    # From 3.12 on Python counts only its own frames, and there may be no such depth.
    assert sys.version_info >= (3, 12) or any(t.recording.gaps for t in traces)


def test_scripted_module_is_one_module(world: World) -> None:
    class Plain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x) * 2

    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.script"):
        scripted = torch.jit.script(Plain())
    model = nn.Sequential(scripted, Own())
    t = run(model)
    assert owners(t) == ["1", "1"]
    assert [module.name for module in t.recording.modules][:3] == ["", "0", "1"]


def test_wrapper_of_the_users_own_shows_in_names(world: World) -> None:
    class Replicas(nn.Module):
        """Like nn.DataParallel: holds the model as `module` and splits the batch."""

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.module(part) for part in x.chunk(2)])

    assert owners(run(Replicas(Own()))) == ["module"] * 4


def test_data_parallel_without_devices_passes_through(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert owners(run(nn.DataParallel(Own()))) == ["module", "module"]


def test_lambdas_as_hooks_that_replace_inputs_and_outputs(world: World) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].register_forward_pre_hook(lambda module, args: (Reduce.apply(args[0]),))
    model[1].register_forward_hook(lambda module, args, out: Reduce.apply(out))
    assert facts(run(model), "phase", "owner") == [
        ("forward", "0"),
        ("forward", "1"),
        ("backward", "1"),
        ("backward", "0"),
    ]


def test_module_with_its_own_call(world: World) -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Own()

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            dist.barrier()
            return super().__call__(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    t = run(nn.Sequential(Calls()))
    assert facts(t, "kind", "owner")[:2] == [("barrier", ""), ("all_reduce", "0.inner")]


def test_model_on_meta_without_a_step_is_described(world: World) -> None:
    with torch.device("meta"):
        model = Net(depth=1)
    with trace(model) as t:
        model(torch.ones(4, 8, device="meta"))
    assert owners(t) == ["layers.0.sum"]
    (linear,) = [m for m in t.recording.modules if m.name == "embed"]
    assert [p.shape for p in linear.parameters] == [(8, 8), (8,)]


def test_generators_and_iterators_as_models_of_one_call(world: World) -> None:
    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Own()

        def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            for _ in range(2):
                yield self.block(x)

    model = Stream()
    with trace(model) as t:
        list(model(batch()))
    assert owners(t) == ["block", "block"]


def test_in_place_and_no_grad_steps(world: World) -> None:
    model = Block()
    with torch.no_grad(), trace(model) as t:
        model(batch())
    with torch.inference_mode(), t:
        model(batch())
    assert facts(t, "phase", "owner") == [("forward", "sum"), ("forward", "sum")]


def test_higher_derivatives_keep_their_owners(world: World) -> None:
    class Squared(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Twice.apply(x) ** 3

    model = nn.Sequential(nn.Linear(8, 8), Squared())
    x = batch().requires_grad_()
    with trace(model) as t:
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
    owners = facts(t, "phase", "owner")
    assert owners == [("forward", "1"), ("backward", "1"), ("backward", "1")]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        dist.barrier()
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        dist.barrier()
        return grad * 2


def test_tracing_costs_a_deep_model_no_stack(world: World) -> None:
    limit = sys.getrecursionlimit()
    frames: list[int] = []

    class Deep(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            frame, count = sys._getframe(), 0
            while frame is not None:
                frame, count = frame.f_back, count + 1
            frames.append(count)
            return x

    model: nn.Module = Deep()
    for _ in range(50):
        model = nn.Sequential(model)
    model(batch())
    with trace(model):
        model(batch())
    plain, traced = frames
    assert traced == plain
    assert sys.getrecursionlimit() == limit


def test_lazy_modules_are_described_once_they_have_shapes(world: World) -> None:
    model = nn.Sequential(nn.LazyLinear(4), Sum())
    with trace(model) as t:
        assert [module.name for module in t.recording.modules] == ["", "1"]
        model(batch())
    described = {module.name: module for module in t.recording.modules}
    assert [parameter.shape for parameter in described["0"].parameters] == [(4, 8), (4,)]
    assert t.recording.gaps == ()


def test_model_can_be_moved_and_cast_inside_and_after(world: World) -> None:
    model = split_mlp(MLP(), world.mesh)
    with trace(model) as t:
        model(batch())
        model.double()
        model(batch().double())
    model.float()
    torch.utils.swap_tensors(model.up.weight, nn.Parameter(model.up.weight.detach().clone()))
    assert len(t.recording.collectives) == 2


def test_parameters_that_took_anothers_place_have_an_owner(world: World) -> None:
    model = Net(depth=1)
    with trace(model) as t:
        model.load_state_dict(model.state_dict(), assign=True)
        model.embed.weight.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
        model(batch()).sum().backward()
    assert facts(t, "owner", "phase")[-1] == ("embed", "backward")
    assert t.recording.gaps == ()


def test_deeply_linked_layers_do_not_slow_tracing_down(world: World) -> None:
    class Dense(nn.Module):
        def __init__(self, before: list[nn.Module]) -> None:
            super().__init__()
            self.before = nn.ModuleList(before[-2:])
            self.sum = Sum()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.sum(x)

    layers: list[nn.Module] = []
    for _ in range(40):  # with a name for every path there would be hundreds of millions
        layers.append(Dense(layers))
    with trace(layers[-1]) as t:
        layers[-1](batch())
    assert facts(t, "owner") == [("sum",)]


def test_name_of_a_shared_block_follows_its_caller_when_fsdp_gathers(world: World) -> None:
    class Half(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x)

    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"encoder": Half(shared), "decoder": Half(shared)})
    fully_shard(shared, mesh=world.mesh, reshard_after_forward=True)
    with trace(model) as t:
        model["decoder"](model["encoder"](batch()))
    assert facts(t, "kind", "owner", "trigger") == [
        ("all_gather", "encoder.block", "encoder.block"),
        ("all_gather", "decoder.block", "decoder.block"),
    ]
