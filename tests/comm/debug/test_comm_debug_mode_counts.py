"""The drop-in for CommDebugMode counts what torch's leaves out, and leaves no trace."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from comm_debug_counts import ALL_REDUCE, counts
from shardscope import World
from shardscope.compat import CommDebugMode
from small_models import Net, batch, everyone, shard_net

functional = torch.ops.c10d_functional
c10d = torch.ops.c10d


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
    net = world.materialize(shard_net(net, world.mesh))
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
    for direction in ("forward", "backward"):
        charged = counts(mode, direction)
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
    hooked_ops = [
        torch.ops._c10d_functional.all_reduce._op,
        torch._C._dispatch_dump("c10d::allreduce_"),
    ]
    own = [
        {key: dict(hooks_by_id) for key, hooks_by_id in vars(m).items() if "_hooks" in key}
        for m in modules
    ]
    return [nn.Module.__call__, hooks, own, hooked_ops, _get_current_dispatch_mode_stack()]


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
    def __init__(self, passes: list[Any]) -> None:
        super().__init__()
        self.passes = passes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes.append("forward")
        doubled = x * 2
        doubled.register_hook(lambda _: self.passes.append("backward"))
        return doubled


def test_tracker_reports_the_running_module(world: World) -> None:
    positions: list[Any] = []
    mode = CommDebugMode()
    tracker: Any = None

    class Probe(list[Any]):
        def append(self, direction: Any) -> None:
            tracker = mode.advanced_module_tracker
            positions.append(
                (direction, tracker.name, tracker.is_bw, tracker.parents, tracker.parent_list)
            )

    model = nn.Sequential(nn.Linear(8, 8), Looking(Probe()))
    with mode:
        tracker = mode.advanced_module_tracker
        assert (tracker.name, tracker.is_bw, tracker.parents) == ("Global", False, {"Global"})
        model(batch()).sum().backward()
        assert not tracker.activation_checkpointing
    around = {"Global", "Sequential", "Sequential.1"}
    assert positions[0] == (
        "forward",
        "Sequential.1",
        False,
        around,
        ["Global", "Sequential", "Sequential.1"],
    )
    assert positions[1][:3] == ("backward", "Sequential.1", True)
    assert positions[1][3] == around
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
        plain, extended = CommDebugMode(), CommDebugMode()
        extended.comm_registry.add(packet)
        for mode in (plain, extended):
            with mode:
                packet(torch.ones(4))
        assert plain.get_comm_counts() == {c10d.allreduce_: 1}
        assert extended.get_comm_counts() == {packet: 1}


def test_repeated_ops_keep_nothing_but_a_reference(world: World) -> None:
    net = Net()
    with CommDebugMode() as mode:
        for _ in range(20):
            net(batch())
    operations = mode.comm_module_operation_counts["Net.embed"]["operations_list"]
    assert len(operations) >= 20
    assert len({id(operation) for operation in operations}) == len(operations) / 20
    assert sys.getsizeof(operations) / len(operations) < 20
