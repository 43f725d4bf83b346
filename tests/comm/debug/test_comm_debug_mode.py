"""`compat.CommDebugMode` beside torch's own: where torch's is right, the answers are the same."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.tensor import (
    DeviceMesh,
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode as TorchCommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from shardscope import World, simulate
from shardscope.compat import CommDebugMode

NUM_RANKS = 4
HEADS = 8
DIM = 16

functional = torch.ops.c10d_functional
c10d = torch.ops.c10d

# torch 2.13 renames some collectives; the old names work in every version we support.
old_names = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

Scenario = Callable[[], object]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 16)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(16, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(10, 16), nn.Linear(16, 10)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self._heads(w(x)) for w in (self.wq, self.wk, self.wv))
        mixed = torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v
        return self.wo(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (HEADS // NUM_RANKS, -1)).transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(DIM, 4 * DIM)
        self.w2 = nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(torch.relu(self.w1(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attention = Attention()
        self.feed_forward = FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.feed_forward(x)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(32, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.output = nn.Linear(DIM, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def parallel_mlp(mesh: DeviceMesh) -> MLP:
    return parallelize_module(MLP(), mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})


def parallel_stack(mesh: DeviceMesh) -> Stacked:
    plan = {f"layers.{i}.0": ColwiseParallel() for i in range(2)}
    plan |= {f"layers.{i}.1": RowwiseParallel() for i in range(2)}
    return parallelize_module(Stacked(), mesh, plan)


def parallel_transformer(mesh: DeviceMesh, *, is_seq_parallel: bool) -> Transformer:
    between = Shard(1) if is_seq_parallel else Replicate()
    gather = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
    plan: dict[str, Any] = {
        "embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "output": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    for i in range(2):
        for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1"):
            plan[f"layers.{i}.{name}"] = ColwiseParallel()
        for name in ("attention.wo", "feed_forward.w2"):
            plan[f"layers.{i}.{name}"] = RowwiseParallel(output_layouts=between)
        if is_seq_parallel:
            plan[f"layers.{i}.norm"] = SequenceParallel()
            plan[f"layers.{i}.attention"] = plan[f"layers.{i}.feed_forward"] = gather
    return parallelize_module(Transformer(), mesh, plan)


@pytest.fixture
def world() -> Iterator[World]:
    with simulate({"tp": NUM_RANKS}) as world:
        yield world


def run_both(scenario: Scenario) -> tuple[CommDebugMode, TorchCommDebugMode]:
    """The same in both, after one run outside, since DTensor works shardings out only once."""
    scenario()
    ours, torchs = CommDebugMode(), TorchCommDebugMode()
    with ours:
        scenario()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's backward hooks warn about themselves
        with torchs:
            scenario()
    return ours, torchs


def assert_same(ours: CommDebugMode, torchs: TorchCommDebugMode) -> None:
    assert ours.get_comm_counts() == torchs.get_comm_counts()
    assert ours.get_total_counts() == torchs.get_total_counts()
    assert ours.comm_module_counts == torchs.comm_module_counts
    tracker, their_tracker = ours.advanced_module_tracker, torchs.advanced_module_tracker
    assert tracker.module_helper_dict == their_tracker.module_helper_dict
    assert tracker.module_parents_dict == their_tracker.module_parents_dict
    assert tracker.parent_dict == their_tracker.parent_dict
    assert ours.get_sharding_info() == torchs.get_sharding_info()
    assert [
        (module, name)
        for module, parameters in ours.get_parameter_info().items()
        for name in parameters
    ] == [
        (module, name)
        for module, parameters in torchs.get_parameter_info().items()
        for name in parameters
    ]


def all_reduces(mode: CommDebugMode, direction: str = "forward") -> dict[str, int]:
    return {
        name: passes[direction][functional.all_reduce]
        for name, passes in mode.comm_module_counts.items()
        if functional.all_reduce in passes[direction]
    }


def test_tensor_parallel_mlp_counts_as_in_torch(world: World) -> None:
    model, batch = parallel_mlp(world.mesh), torch.rand(8, 10)
    ours, torchs = run_both(lambda: model(batch).sum().backward())
    assert_same(ours, torchs)
    assert list(ours.advanced_module_tracker.module_helper_dict) == [
        "Global",
        "MLP",
        "MLP.net1",
        "MLP.relu",
        "MLP.net2",
    ]
    assert all_reduces(ours) == {"Global": 1, "MLP": 1, "MLP.net2": 1}
    assert ours.get_comm_module_counts() is ours.comm_module_counts


def test_sharding_and_parameters_are_those_of_the_model(world: World) -> None:
    model = parallel_mlp(world.mesh)
    with CommDebugMode() as mode:
        model(torch.rand(8, 10))
    assert mode.get_sharding_info() == {
        "MLP.net1.weight": (Shard(0),),
        "MLP.net1.bias": (Shard(0),),
        "MLP.net2.weight": (Shard(1),),
        "MLP.net2.bias": (Replicate(),),
    }
    weight = mode.get_parameter_info()["MLP.net1"]["weight"]
    assert isinstance(weight, DTensor)
    assert weight.to_local().data_ptr() == model.net1.weight.to_local().data_ptr()


def test_nested_modules_count_as_in_torch(world: World) -> None:
    model, batch = parallel_stack(world.mesh), torch.rand(8, 10)
    ours, torchs = run_both(lambda: model(batch).sum().backward())
    assert_same(ours, torchs)
    assert all_reduces(ours)["Stacked.layers.0"] == 1
    assert "Stacked.layers" not in ours.comm_module_counts


def test_transformer_counts_as_in_torch(world: World) -> None:
    model = parallel_transformer(world.mesh, is_seq_parallel=False)
    tokens = torch.randint(0, 32, (8, 8))
    ours, torchs = run_both(lambda: model(tokens).sum().backward())
    assert_same(ours, torchs)
    assert all_reduces(ours) == {
        "Global": 5,
        "Transformer": 5,
        "Transformer.embeddings": 1,
        **{
            f"Transformer.layers.{i}{name}": count
            for i in range(2)
            for name, count in {
                "": 2,
                ".attention": 1,
                ".attention.wo": 1,
                ".feed_forward": 1,
                ".feed_forward.w2": 1,
            }.items()
        },
    }
    passes = ours.comm_module_counts["Transformer.output"]
    assert passes["forward"] == {functional.all_gather_into_tensor: 1}


def test_sequence_parallel_transformer_counts_as_in_torch_but_for_backward_owners(
    world: World,
) -> None:
    model = parallel_transformer(world.mesh, is_seq_parallel=True)
    tokens = torch.randint(0, 32, (8, 8))
    ours, torchs = run_both(lambda: model(tokens))
    assert_same(ours, torchs)

    ours, torchs = run_both(lambda: model(tokens).sum().backward())
    assert ours.get_comm_counts() == torchs.get_comm_counts()
    assert ours.comm_module_counts["Transformer"] == torchs.comm_module_counts["Transformer"]
    # Attention's input causes the gather, so attention owns its backward, not a child.
    child = "Transformer.layers.0.attention.wq"
    assert functional.reduce_scatter_tensor in torchs.comm_module_counts[child]["backward"]
    assert child not in ours.comm_module_counts
    own = ours.comm_module_counts["Transformer.layers.0.attention"]["backward"]
    assert own[functional.reduce_scatter_tensor] == 1


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


def everyone() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


FUNCTIONAL_CALLS: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: funcol.all_reduce(ones(4), "sum", everyone()),
    "all_gather_into_tensor": lambda: funcol.all_gather_tensor(ones(4), 0, everyone()),
    "reduce_scatter_tensor": lambda: funcol.reduce_scatter_tensor(ones(8), "sum", 0, everyone()),
    "broadcast": lambda: funcol.broadcast(ones(4), 0, everyone()),
    "all_to_all_single": lambda: funcol.all_to_all_single(ones(4), None, None, everyone()),
    "all_reduce_coalesced": lambda: funcol.all_reduce_coalesced([ones(4)], "sum", everyone()),
    "all_gather_into_tensor_coalesced": lambda: funcol.all_gather_into_tensor_coalesced(
        [ones(4), ones(2)], everyone()
    ),
    "reduce_scatter_tensor_coalesced": lambda: funcol.reduce_scatter_tensor_coalesced(
        [ones(8), ones(4)], "sum", [0, 0], everyone()
    ),
}


@old_names
@pytest.mark.parametrize("name", FUNCTIONAL_CALLS)
def test_functional_collective_counts_as_in_torch(world: World, name: str) -> None:
    ours, torchs = run_both(FUNCTIONAL_CALLS[name])
    assert_same(ours, torchs)
    assert ours.get_comm_counts() == {getattr(functional, name): 1}
    assert ours.comm_module_counts == {
        "Global": {"forward": {getattr(functional, name): 1}, "backward": {}}
    }


def test_differentiable_all_to_all_counts_both_ways_as_in_torch(world: World) -> None:
    def exchange() -> None:
        x = torch.ones(8, requires_grad=True)
        funcol.all_to_all_single_autograd(x, None, None, everyone()).sum().backward()

    ours, torchs = run_both(exchange)
    assert_same(ours, torchs)
    expected = {functional.all_to_all_single: 1}
    assert ours.comm_module_counts["Global"] == {"forward": expected, "backward": expected}


def gathered() -> list[torch.Tensor]:
    return [ones(4) for _ in range(NUM_RANKS)]


C10D_CALLS: dict[str, Callable[[], object]] = {
    "broadcast_": lambda: dist.broadcast(ones(4), 0),
    "allreduce_": lambda: dist.all_reduce(ones(4)),
    "reduce_": lambda: dist.reduce(ones(4), 0),
    "scatter_": lambda: dist.scatter(ones(4), gathered(), src=0),
    "gather_": lambda: dist.gather(ones(4), gathered(), dst=0),
    "allgather_": lambda: dist.all_gather(gathered(), ones(4)),
    "_allgather_base_": lambda: dist.all_gather_into_tensor(ones(16), ones(4)),
    "reduce_scatter_": lambda: dist.reduce_scatter(ones(4), gathered()),
    "_reduce_scatter_base_": lambda: dist.reduce_scatter_tensor(ones(4), ones(16)),
    "alltoall_": lambda: dist.all_to_all(gathered(), gathered()),
    "alltoall_base_": lambda: dist.all_to_all_single(ones(4), ones(4)),
}


@old_names
@pytest.mark.parametrize("name", C10D_CALLS)
def test_process_group_collective_counts_as_in_torch(world: World, name: str) -> None:
    ours, torchs = run_both(C10D_CALLS[name])
    assert_same(ours, torchs)
    assert ours.get_comm_counts() == {getattr(c10d, name): 1}


@pytest.fixture
def second_of_two() -> Iterator[None]:
    """A group of torch's own, which checks nothing, seen from a rank that is not the root."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def coalesced(call: Callable[[], object]) -> None:
    with dist._coalescing_manager():
        call()


UNCHECKED_CALLS: dict[str, Callable[[], object]] = {
    "gather_": lambda: dist.gather(ones(4), None, 0),
    "scatter_": lambda: dist.scatter(ones(4), None, 0),
    "allgather_": lambda: dist.all_gather([], ones(4)),
    "allgather_coalesced_": lambda: dist.all_gather_coalesced([[ones(4)]] * 2, [ones(4)]),
    "allreduce_coalesced_": lambda: dist.all_reduce_coalesced(ones(4)),
    "allgather_into_tensor_coalesced_": lambda: coalesced(
        lambda: dist.all_gather_into_tensor(ones(8), ones(4))
    ),
    "reduce_scatter_tensor_coalesced_": lambda: coalesced(
        lambda: dist.reduce_scatter_tensor(ones(4), ones(8))
    ),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", UNCHECKED_CALLS)
def test_call_on_a_bare_fake_group_counts_as_in_torch(second_of_two: None, name: str) -> None:
    ours, torchs = run_both(UNCHECKED_CALLS[name])
    assert_same(ours, torchs)
    assert ours.get_comm_counts() == {getattr(c10d, name): 1}


def test_no_process_group_is_needed() -> None:
    model = nn.Linear(2, 2)
    with CommDebugMode() as mode:
        for _ in range(2):
            model(torch.ones(1, 2))
    assert mode.get_total_counts() == 0
    assert list(mode.advanced_module_tracker.module_helper_dict) == ["Global", "Linear"]
    assert not model._forward_hooks


def test_dtensor_redistribution_counts_as_in_torch(world: World) -> None:
    sharded = distribute_tensor(torch.rand(8, 4), world.mesh, [Shard(0)])

    def replicate() -> None:
        sharded.redistribute(world.mesh, [Replicate()]).to_local()

    ours, torchs = run_both(replicate)
    assert_same(ours, torchs)
    assert ours.get_comm_counts() == {functional.all_gather_into_tensor: 1}


@pytest.mark.parametrize("noise_level", [0, 1, 2])
def test_table_is_torchs_to_the_byte(world: World, noise_level: int) -> None:
    model, batch = parallel_mlp(world.mesh), torch.rand(8, 10)
    ours, torchs = run_both(lambda: model(batch))
    assert ours.generate_comm_debug_tracing_table(
        noise_level
    ) == torchs.generate_comm_debug_tracing_table(noise_level)


def test_highest_noise_level_adds_trivial_ops_alone(world: World) -> None:
    # Not compared with torch's, which lists the detaches and views of its own hooks.
    model, batch = parallel_mlp(world.mesh), torch.rand(8, 10)
    ours, _ = run_both(lambda: model(batch))
    table = ours.generate_comm_debug_tracing_table()
    trivial = r".*\*\*aten\.(detach|t|view)\.default.*\n(.*(shape|sharding|device mesh): .*\n)*"
    assert "**aten.t.default" in table
    assert re.sub(trivial, "", table) == ours.generate_comm_debug_tracing_table(2)


@pytest.mark.parametrize("noise_level", [0, 1, 2])
def test_json_equals_torchs(world: World, tmp_path: Path, noise_level: int) -> None:
    model, batch = parallel_mlp(world.mesh), torch.rand(8, 10)
    ours, torchs = run_both(lambda: model(batch).sum().backward())
    dumps = []
    for mode in (ours, torchs):
        mode.generate_json_dump(file_name=str(tmp_path / "dump.json"), noise_level=noise_level)
        dumps.append(json.loads((tmp_path / "dump.json").read_text()))
    assert dumps[0] == dumps[1]
    assert list(dumps[0]) == list(dumps[1])
    assert dumps[0]["children"][0]["fqn"] == "MLP"


def test_operations_have_the_fields_of_torchs(world: World) -> None:
    model, batch = parallel_mlp(world.mesh), torch.rand(8, 10)
    ours, torchs = run_both(lambda: model(batch))

    def addmm(mode: Any) -> list[dict[str, Any]]:
        operations = mode.comm_module_operation_counts["MLP.net1"]["operations_list"]
        return [op for op in operations if op["name"] is torch.ops.aten.addmm.default]

    assert addmm(ours) == addmm(torchs)
    assert addmm(ours)[0]["input_sharding"] == [(Shard(0),), (Replicate(),), (Shard(1),)]


def test_logs_are_the_tables_without_colours(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, batch = parallel_mlp(world.mesh), torch.rand(8, 10)
    ours, torchs = run_both(lambda: model(batch))
    torchs.log_comm_debug_tracing_table_to_file(noise_level=2)
    expected = Path("comm_mode_log.txt").read_text()
    ours.log_comm_debug_tracing_table_to_file(noise_level=2)
    assert Path("comm_mode_log.txt").read_text() == expected
    assert "\033" not in expected

    ours.log_module_tracing_table_to_file()
    ours.log_module_tracing_table_to_file(file_name="named.txt")
    ours.generate_json_dump()
    assert Path("output.txt").read_text() == Path("named.txt").read_text()
    assert Path("comm_mode_log.json").exists()


def test_older_table_shows_collectives_by_module(world: World) -> None:
    model = parallel_mlp(world.mesh)
    with CommDebugMode() as mode:
        model(torch.rand(8, 10))
    assert mode.generate_module_tracing_table() == (
        "Global\n"
        "\033[1;33m  *c10d_functional.all_reduce: 1\033[0m\n"
        "  MLP\n"
        "\033[1;33m    *c10d_functional.all_reduce: 1\033[0m\n"
        "    MLP.net1\n"
        "    MLP.relu\n"
        "    MLP.net2\n"
        "\033[1;33m      *c10d_functional.all_reduce: 1\033[0m\n"
    )


def test_printed_information_is_torchs(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    model, batch = parallel_mlp(world.mesh), torch.rand(8, 10)
    ours, torchs = run_both(lambda: model(batch))
    ours.print_sharding_info()
    printed = capsys.readouterr().out
    torchs.advanced_module_tracker.print_sharding_info()
    assert printed == capsys.readouterr().out
    assert printed.startswith("MLP.net1.weight: (Shard(dim=0),)\n")
    ours.print_paramater_info()
    assert "'MLP.net1': {'weight': DTensor(" in capsys.readouterr().out


def test_public_names_are_torchs() -> None:
    ours, torchs = CommDebugMode(), TorchCommDebugMode()
    assert isinstance(ours, TorchDispatchMode)
    assert repr(ours) == repr(torchs) == "CommDebugMode(get_total_counts()=0)"
    assert ours.comm_registry == torchs.comm_registry
    public = {name for name in dir(torchs) if not name.startswith("_")}
    assert public <= set(dir(ours))
    tracker = {name for name in vars(torchs.advanced_module_tracker) if not name.startswith("_")}
    tracker -= {"register_forward_hook_handles"}  # there are no hooks to hold
    assert tracker <= set(dir(ours.advanced_module_tracker))
