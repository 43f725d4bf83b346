"""`compat.CommDebugMode` where torch's own crashes, miscounts or charges the wrong module."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from shardscope import World, simulate
from shardscope.compat import CommDebugMode

functional = torch.ops.c10d_functional
c10d = torch.ops.c10d
ALL_REDUCE = functional.all_reduce


def everyone() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


class Sum(nn.Module):
    """Adds up over the ranks, forwards and backwards."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Reduce.apply(x)


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(x, "sum", everyone()) * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(grad, "sum", everyone()) * 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.sum = Sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.sum(self.linear(x)))


class Net(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def world() -> Iterator[World]:
    with simulate({"dp": 4}) as world:
        yield world


def counts(mode: CommDebugMode, which: str, key: Any = ALL_REDUCE) -> dict[str, int]:
    """How many of one kind each module was charged in one pass, where any."""
    return {
        name: passes[which][key]
        for name, passes in mode.comm_module_counts.items()
        if key in passes[which]
    }


def batch() -> torch.Tensor:
    return torch.rand(4, 8)


def test_modules_may_run_many_times(world: World) -> None:
    net = Net()
    with CommDebugMode() as mode:
        for _ in range(3):  # microbatches
            net(batch()).sum().backward()
    expected = {
        "Global": 6,
        "Net": 6,
        "Net.layers.0": 3,
        "Net.layers.0.sum": 3,
        "Net.layers.1": 3,
        "Net.layers.1.sum": 3,
    }
    assert counts(mode, "forward") == counts(mode, "backward") == expected
    assert mode.advanced_module_tracker.parent_dict["Net"] == [
        "Net.embed",
        "Net.layers.0",
        "Net.layers.1",
    ]


def test_backward_of_interleaved_microbatches_is_charged_to_its_modules(world: World) -> None:
    net = Net()
    with CommDebugMode() as mode:
        losses = [net(batch()).sum() for _ in range(2)]
        for loss in losses:
            loss.backward()
    assert counts(mode, "backward")["Net.layers.0.sum"] == 2
    assert counts(mode, "backward")["Net.layers.1.sum"] == 2


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = Block()
        self.first = nn.Sequential(shared)
        self.second = nn.Sequential(shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_shared_module_is_charged_at_each_of_its_places(world: World) -> None:
    model = Twice()
    with CommDebugMode() as mode:
        model(batch()).sum().backward()
    expected = {
        "Global": 2,
        "Twice": 2,
        "Twice.first": 1,
        "Twice.first.0": 1,
        "Twice.first.0.sum": 1,
        "Twice.second": 1,
        "Twice.second.0": 1,
        "Twice.second.0.sum": 1,
    }
    assert counts(mode, "forward") == counts(mode, "backward") == expected


def test_models_of_one_class_are_told_apart(world: World) -> None:
    first, second = Net(depth=1), Net(depth=2)
    with CommDebugMode() as mode:
        second(first(batch())).sum().backward()
    for which in ("forward", "backward"):
        assert counts(mode, which)["Net"] == 1
        assert counts(mode, which)["Net#2"] == 2
        assert counts(mode, which)["Global"] == 3


def run_checkpointed(use_reentrant: bool) -> Callable[[Net, torch.Tensor], torch.Tensor]:
    def run(net: Net, x: torch.Tensor) -> torch.Tensor:
        x = net.embed(x)
        for layer in net.layers:
            x = checkpoint(layer, x, use_reentrant=use_reentrant)
        return x

    return run


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recompute_is_charged_to_what_is_recomputed(world: World, use_reentrant: bool) -> None:
    net = Net()
    net.forward = run_checkpointed(use_reentrant).__get__(net)  # type: ignore[method-assign]
    with CommDebugMode() as mode:
        net(batch()).sum().backward()
    assert counts(mode, "forward")["Net.layers.0.sum"] == 1
    assert counts(mode, "backward") == {
        "Global": 4,
        "Net": 4,
        "Net.layers.0": 2,
        "Net.layers.0.sum": 2,
        "Net.layers.1": 2,
        "Net.layers.1.sum": 2,
    }


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_ops_are_listed_as_checkpointing(world: World, use_reentrant: bool) -> None:
    net = Net()
    net.forward = run_checkpointed(use_reentrant).__get__(net)  # type: ignore[method-assign]
    with CommDebugMode() as mode:
        net(batch()).sum().backward()
    operations = mode.comm_module_operation_counts["Net.layers.0.linear"]["operations_list"]
    ran = [
        (op["is_bw"], op["is_activation_checkpointing"])
        for op in operations
        if op["name"] is torch.ops.aten.addmm.default
    ]
    assert ran == [(False, False), (True, True)]
    matmuls = [op for op in operations if op["name"] is torch.ops.aten.mm.default]
    assert {(op["is_bw"], op["is_activation_checkpointing"]) for op in matmuls} == {(True, False)}
    table = mode.generate_comm_debug_tracing_table()
    section = table.split("Net.layers.0.linear\n")[1].split("Net.layers.0.sum\n")[0]
    assert "ACTIVATION CHECKPOINTING" in section


class WithMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(Reduce.apply(torch.sin(x)))

    use_reentrant = False


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_method_belongs_to_its_module(world: World, use_reentrant: bool) -> None:
    model = WithMethod()
    model.use_reentrant = use_reentrant
    with CommDebugMode() as mode:
        model(batch().requires_grad_()).sum().backward()
    assert counts(mode, "backward") == {"Global": 2, "WithMethod": 2}
    operations = mode.comm_module_operation_counts["WithMethod"]["operations_list"]
    sines = [op for op in operations if op["name"] is torch.ops.aten.sin.default]
    assert [op["is_activation_checkpointing"] for op in sines] == [False, True]


def test_checkpoint_wrapper_shows_in_names_as_in_torch(world: World) -> None:
    model = nn.Sequential(checkpoint_wrapper(Block()))
    with CommDebugMode() as mode:
        model(batch()).sum().backward()
    inner = "Sequential.0._checkpoint_wrapped_module"
    assert counts(mode, "forward")[f"{inner}.sum"] == 1
    assert counts(mode, "backward") == {
        "Global": 2,
        "Sequential": 2,
        "Sequential.0": 2,
        inner: 2,
        f"{inner}.sum": 2,
    }


def test_collectives_after_backward_belong_to_no_module(world: World) -> None:
    net = Net()
    fully_shard(net, mesh=world.mesh)
    with CommDebugMode() as mode:
        net(batch()).sum().backward()
        before = dict(mode.comm_module_counts["FSDPNet"]["forward"])
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        assert mode.advanced_module_tracker.name == "Global"
    assert mode.comm_module_counts["FSDPNet"]["forward"] == before
    assert mode.comm_module_counts["Global"]["forward"][ALL_REDUCE] == before[ALL_REDUCE] + 1


def test_optimizer_collectives_belong_to_no_module(world: World) -> None:
    class Reducing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            dist.all_reduce(torch.ones(1))
            return super().step(closure)

    net = Net()
    optimizer = Reducing(net.parameters(), lr=0.1)
    with CommDebugMode() as mode:
        net(batch()).sum().backward()
        optimizer.step()
    assert counts(mode, "forward", c10d.allreduce_) == {"Global": 1}


def test_forward_may_run_outside(world: World) -> None:
    loss = Net()(batch()).sum()
    with CommDebugMode() as mode:
        loss.backward()
    assert counts(mode, "backward") == {"Global": 2}
    assert "forward ran before" in mode.gaps[0].fact
    mode.generate_comm_debug_tracing_table()


def shard_layers(net: Net, world: World) -> Net:
    for layer in net.layers:
        fully_shard(layer, mesh=world.mesh)
    fully_shard(net, mesh=world.mesh)
    return net


def test_fully_sharded_modules_own_their_gathers_and_reductions(world: World) -> None:
    net = shard_layers(Net(), world)
    with CommDebugMode() as mode:
        net(batch()).sum().backward()
    gathers, reductions = c10d._allgather_base_, c10d._reduce_scatter_base_
    assert counts(mode, "forward", gathers) == {
        "Global": 3,
        "FSDPNet": 3,
        "FSDPNet.layers.0": 1,
        "FSDPNet.layers.1": 1,
    }
    assert counts(mode, "backward", gathers)["FSDPNet.layers.0"] == 1
    assert counts(mode, "backward", reductions) == {
        "Global": 3,
        "FSDPNet": 3,
        "FSDPNet.layers.0": 1,
        "FSDPNet.layers.1": 1,
    }
    listed = mode.comm_module_operation_counts["FSDPNet.layers.0"]["operations_list"]
    assert [op["is_bw"] for op in listed if op["name"] is gathers.default] == [False, True]


def test_sharding_is_known_while_fsdp_has_parameters_gathered(world: World) -> None:
    net = shard_layers(Net(), world)
    with CommDebugMode() as mode:
        net(batch())
    expected = {f"FSDPNet.{name}": (Shard(0),) for name, _ in net.named_parameters()}
    assert mode.get_sharding_info() == expected
    assert len(expected) == 6
    held = mode.get_parameter_info()["FSDPNet.layers.0.linear"]["weight"]
    assert held.to_local().shape == (2, 8)
    helper = mode.advanced_module_tracker.module_helper_dict["FSDPNet.layers.0.linear"]
    assert helper["parameters"]["weight"] == "(Shard(dim=0),)"


def test_fully_sharded_forward_may_run_outside(world: World) -> None:
    net = shard_layers(Net(), world)
    loss = net(batch()).sum()
    with CommDebugMode() as mode:
        loss.backward()
    reductions = counts(mode, "backward", c10d._reduce_scatter_base_)
    assert reductions == {
        "Global": 3,
        "FSDPNet": 3,
        "FSDPNet.layers.0": 1,
        "FSDPNet.layers.1": 1,
    }
    assert "FSDPNet.layers.1" in mode.generate_comm_debug_tracing_table(0)


def test_prefetched_module_is_charged_and_shown_in_its_place(world: World) -> None:
    net = shard_layers(Net(), world)
    net.layers[0].set_modules_to_forward_prefetch([net.layers[1]])
    with CommDebugMode() as mode:
        net(batch())
    assert counts(mode, "forward", c10d._allgather_base_)["FSDPNet.layers.1"] == 1
    shown = [line.strip() for line in mode.generate_module_tracing_table().splitlines()]
    names = [line for line in shown if line.startswith("FSDPNet.layers")]
    assert names == [
        f"FSDPNet.layers.{i}{part}" for i in range(2) for part in ("", ".linear", ".sum")
    ]


FUNCTIONAL_VARIANTS: dict[str, tuple[str, Callable[[str], object]]] = {
    "all_reduce_": (
        "all_reduce",
        lambda group: torch.ops._c10d_functional.all_reduce_(torch.ones(4), "sum", group),
    ),
    "broadcast_": (
        "broadcast",
        lambda group: torch.ops._c10d_functional.broadcast_(torch.ones(4), 0, group),
    ),
    "all_reduce_coalesced_": (
        "all_reduce_coalesced",
        lambda group: torch.ops._c10d_functional.all_reduce_coalesced_(
            [torch.ones(4)], "sum", group
        ),
    ),
    "all_gather_into_tensor_out": (
        "all_gather_into_tensor",
        lambda group: torch.ops._c10d_functional.all_gather_into_tensor_out(
            torch.ones(4), 4, group, out=torch.ones(16)
        ),
    ),
    "reduce_scatter_tensor_out": (
        "reduce_scatter_tensor",
        lambda group: torch.ops._c10d_functional.reduce_scatter_tensor_out(
            torch.ones(16), "sum", 4, group, out=torch.ones(4)
        ),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONAL_VARIANTS)
def test_functional_variant_counts_under_its_base_name(world: World, name: str) -> None:
    base, call = FUNCTIONAL_VARIANTS[name]
    with CommDebugMode() as mode:
        call(everyone().group_name)
    assert mode.get_comm_counts() == {getattr(functional, base): 1}


POINT_TO_POINT: dict[str, Callable[[], object]] = {
    "barrier": lambda: dist.barrier(),
    "send": lambda: dist.send(torch.ones(4), 1),
    "recv_": lambda: dist.recv(torch.ones(4), 1),
    "recv_any_source_": lambda: dist.irecv(torch.ones(4)),
}


@pytest.mark.parametrize("name", POINT_TO_POINT)
def test_what_torch_leaves_out_is_counted(world: World, name: str) -> None:
    with CommDebugMode() as mode:
        POINT_TO_POINT[name]()
    assert mode.get_comm_counts() == {getattr(c10d, name): 1}


def test_batched_sends_are_counted_one_by_one(world: World) -> None:
    operations = [
        dist.P2POp(dist.isend, torch.ones(4), 1),
        dist.P2POp(dist.irecv, torch.ones(4), 2),
    ]
    with CommDebugMode() as mode:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    assert mode.get_comm_counts() == {c10d.send: 1, c10d.recv_: 1}


def test_collectives_of_other_threads_are_counted(world: World) -> None:
    def work() -> None:
        dist.all_reduce(torch.ones(4))
        funcol.all_reduce(torch.ones(4), "sum", everyone())

    with CommDebugMode() as mode:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert mode.get_comm_counts() == {c10d.allreduce_: 1, ALL_REDUCE: 1}


def test_collectives_on_fake_tensors_are_counted(world: World) -> None:
    net = Net()
    with FakeTensorMode(allow_non_fake_inputs=True), CommDebugMode() as mode:
        net(batch()).sum()
        dist.all_reduce(torch.ones(4))
    assert counts(mode, "forward")["Net.layers.1.sum"] == 1
    assert mode.get_comm_counts() == {ALL_REDUCE: 2, c10d.allreduce_: 1}


def test_simulated_model_without_data_is_counted(world: World) -> None:
    with torch.device("meta"):
        net = Net()
    net = world.materialize(shard_layers(net, world))
    with CommDebugMode() as mode:
        net(batch()).sum().backward()
    assert counts(mode, "backward", c10d._reduce_scatter_base_)["FSDPNet.layers.0"] == 1
    assert counts(mode, "backward")["FSDPNet.layers.0.sum"] == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing inductor warns
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_model_stays_compiled_and_is_counted(world: World, backend: str) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(funcol.all_reduce(self.linear(x), "sum", everyone()))

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = Plain()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad(), CommDebugMode() as mode:
        compiled(batch())
        compiled(batch())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert mode.get_comm_counts() == {ALL_REDUCE: 2}
    assert counts(mode, "forward")["OptimizedModule"] == 2
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own making
def test_compiled_layers_are_charged_forward_and_backward(world: World) -> None:
    torch._dynamo.reset()
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)))
    for layer in net:
        parallelize_module(layer, world.mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        layer.compile(backend="aot_eager")
    with CommDebugMode() as mode:
        for _ in range(2):
            net(batch().requires_grad_()).sum().backward()
    for which in ("forward", "backward"):
        charged = counts(mode, which)
        assert (charged["Global"], charged["Sequential"]) == (4, 4)
        assert (charged["Sequential.0"], charged["Sequential.1"]) == (2, 2)
    torch._dynamo.reset()


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        dist.barrier()
        torch._dynamo.graph_break()
        return self.second(funcol.all_reduce(x, "sum", everyone()) * 1)


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own making
def test_compiler_makes_the_same_graphs_of_the_same_frames(world: World) -> None:
    def compile_and_run() -> list[dict[str, int]]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(Breaking(), backend="aot_eager")
        for _ in range(2):
            compiled(batch())
        return [dict(torch._dynamo.utils.counters[name]) for name in ("frames", "stats")]

    plain = compile_and_run()
    with CommDebugMode() as mode:
        assert compile_and_run() == plain
    assert mode.get_comm_counts() == {c10d.barrier: 2, ALL_REDUCE: 2}
    torch._dynamo.reset()


def test_entering_again_starts_afresh_and_keeps_what_was_taken_out(world: World) -> None:
    mode, net = CommDebugMode(), Net()
    with mode:
        net(batch())
    taken, tracker = mode.get_comm_counts(), mode.advanced_module_tracker
    with mode:
        assert mode.get_total_counts() == 0
        assert mode.comm_module_counts == {"Global": {"forward": {}, "backward": {}}}
        assert mode.get_parameter_info() == {}
        assert list(mode.advanced_module_tracker.module_helper_dict) == ["Global"]
        Net(depth=1)(batch())
    assert taken == {ALL_REDUCE: 2}
    assert "Net.layers.1" in tracker.module_helper_dict
    assert counts(mode, "forward") == {
        "Global": 1,
        "Net": 1,
        "Net.layers.0": 1,
        "Net.layers.0.sum": 1,
    }


def test_entering_within_itself_counts_once(world: World) -> None:
    mode, net = CommDebugMode(), Net()
    modes = _get_current_dispatch_mode_stack()
    with mode:
        net(batch())
        with mode:
            net(batch())
        net(batch())
    assert counts(mode, "forward")["Net.layers.0.sum"] == 3
    operations = mode.comm_module_operation_counts["Net.embed"]["operations_list"]
    assert [op["name"] for op in operations].count(torch.ops.aten.addmm.default) == 3
    assert _get_current_dispatch_mode_stack() == modes


def test_two_modes_count_side_by_side(world: World) -> None:
    net = Net()
    with CommDebugMode() as outer:
        net(batch())
        with CommDebugMode() as inner:
            net(batch())
    assert (outer.get_total_counts(), inner.get_total_counts()) == (4, 2)
    for mode in (outer, inner):
        assert "Net.embed" in mode.comm_module_operation_counts


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("midway")


def torch_state(*models: nn.Module) -> list[Any]:
    hooks = [
        dict(vars(module_hooks)[name])
        for name in sorted(vars(module_hooks))
        if name.startswith("_global_") and name.endswith("_hooks")
    ]
    modules = [module for model in models for module in model.modules()]
    doors = [torch.ops._c10d_functional.all_reduce._op, torch._C._dispatch_dump("c10d::allreduce_")]
    own = [{key: dict(held) for key, held in vars(m).items() if "_hooks" in key} for m in modules]
    return [nn.Module.__call__, hooks, own, doors, _get_current_dispatch_mode_stack()]


def test_exception_leaves_torch_and_model_as_found(world: World) -> None:
    net = Net()
    net.layers.append(Failing())
    before = torch_state(net)
    mode = CommDebugMode()
    with pytest.raises(ArithmeticError, match="midway"), mode:
        net(batch())
    assert torch_state(net) == before
    assert counts(mode, "forward")["Net.layers.1.sum"] == 1
    del net.layers[2]
    before = torch_state(net)
    with mode:
        with pytest.raises(ArithmeticError):
            Failing()(batch())
        assert mode.advanced_module_tracker.name == "Global"
        net(batch()).sum().backward()
    assert counts(mode, "backward")["Net.layers.1.sum"] == 1
    assert torch_state(net) == before


def test_refused_collective_leaves_torch_as_found(world: World) -> None:
    before = torch_state()
    with pytest.raises(Exception, match="77"), CommDebugMode() as mode:
        dist.broadcast(torch.ones(4), 77)
    assert torch_state() == before
    assert mode.get_total_counts() == 0


class Looking(nn.Module):
    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append("forward")
        doubled = x * 2
        doubled.register_hook(lambda _: self.seen.append("backward"))
        return doubled


def test_tracker_says_where_it_is(world: World) -> None:
    seen: list[Any] = []
    mode = CommDebugMode()
    tracker: Any = None

    class Probe(list[Any]):
        def append(self, what: Any) -> None:
            tracker = mode.advanced_module_tracker
            seen.append((what, tracker.name, tracker.is_bw, tracker.parents, tracker.parent_list))

    model = nn.Sequential(nn.Linear(8, 8), Looking(Probe()))
    with mode:
        tracker = mode.advanced_module_tracker
        assert (tracker.name, tracker.is_bw, tracker.parents) == ("Global", False, {"Global"})
        model(batch()).sum().backward()
        assert not tracker.activation_checkpointing
    around = {"Global", "Sequential", "Sequential.1"}
    assert seen[0] == (
        "forward",
        "Sequential.1",
        False,
        around,
        ["Global", "Sequential", "Sequential.1"],
    )
    assert seen[1][:3] == ("backward", "Sequential.1", True)
    assert seen[1][3] == around
    assert tracker.module_depth_dict["Sequential.1"] == 2


def test_registered_op_counts_as_one_collective(world: World) -> None:
    with torch.library._scoped_library("shardscope_test", "FRAGMENT") as library:
        library.define("ring(Tensor x) -> Tensor")

        def ring(x: torch.Tensor) -> torch.Tensor:
            out = x.clone()
            dist.all_reduce(out)
            return out

        library.impl("ring", ring, "CPU")
        packet = torch.ops.shardscope_test.ring
        plain, told = CommDebugMode(), CommDebugMode()
        told.comm_registry.add(packet)
        for mode in (plain, told):
            with mode:
                packet(torch.ones(4))
        assert plain.get_comm_counts() == {c10d.allreduce_: 1}
        assert told.get_comm_counts() == {packet: 1}


def test_repeated_ops_keep_nothing_but_a_reference(world: World) -> None:
    net = Net()
    with CommDebugMode() as mode:
        for _ in range(20):
            net(batch())
    operations = mode.comm_module_operation_counts["Net.embed"]["operations_list"]
    assert len(operations) >= 20
    assert len({id(operation) for operation in operations}) == len(operations) / 20
    assert sys.getsizeof(operations) / len(operations) < 20


def test_model_with_mixed_parallelism_is_charged_by_module(world: World) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(net, world.mesh, plan)
    with CommDebugMode() as mode, warnings.catch_warnings():
        warnings.simplefilter("error")  # none of our hooks warn
        for _ in range(2):
            net(batch().requires_grad_()).sum().backward()
    assert counts(mode, "forward") == {"Global": 2, "Sequential": 2, "Sequential.1": 2}
    assert counts(mode, "backward") == {"Global": 2, "Sequential": 2, "Sequential.0": 2}
