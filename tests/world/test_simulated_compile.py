"""`torch.compile` in a simulated world, on tensors that have no data to run kernels on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch._inductor import config
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardscope import Recording, World, simulate, trace
from shardscope.record import Compiled

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # as Inductor loads
    pytest.mark.filterwarnings("ignore:erase_node.*already erased:UserWarning"),
    pytest.mark.usefixtures("fresh_dynamo"),
]
BOTH = pytest.mark.parametrize("device", ["cpu", "cuda"])


@pytest.fixture
def fresh_dynamo() -> None:
    torch.compiler.reset()


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 128, bias=False)
        self.down = nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def train(device: str, shard: Callable[[nn.Module, World], Any], **options: Any) -> Recording:
    with simulate(mesh={"x": 4}, device=device) as world:
        with torch.device("meta"):
            model = FeedForward()
        shard(model, world)
        world.materialize(model)
        model.compile(**options)
        with trace(model) as t:
            model(torch.randn(64, 64, device=device)).sum().backward()
    return t.recording


def shard_by_sequence(model: nn.Module, world: World) -> None:
    plan = {
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(model, world.mesh, plan)


def ops(recording: Recording) -> list[tuple[str, str, int]]:
    return [(str(c.phase), c.op.partition(".")[2], c.input_bytes) for c in recording.collectives]


@BOTH
def test_inductor_runs_without_kernels(device: str) -> None:
    assert ops(train(device, lambda model, world: None)) == []


@BOTH
@pytest.mark.parametrize("options", [{}, {"mode": "max-autotune"}, {"dynamic": True}], ids=str)
def test_collectives_of_a_compiled_graph_are_recorded(device: str, options: dict[str, Any]) -> None:
    recording = train(device, shard_by_sequence, **options)
    assert ops(recording) == [
        ("forward", "all_gather_into_tensor", 16384),
        ("forward", "reduce_scatter_tensor", 65536),
        ("backward", "all_gather_into_tensor", 16384),
    ]
    assert recording.gaps == ()


@BOTH
def test_fsdp_around_a_compiled_layer(device: str) -> None:
    recording = train(device, lambda model, world: fully_shard(model, mesh=world.mesh))
    assert [(phase, op) for phase, op, _ in ops(recording)] == [
        ("forward", "_allgather_base_"),
        ("backward", "_reduce_scatter_base_"),
    ]


def test_asynchronous_tensor_parallel_fuses_collectives_with_matrix_products() -> None:
    def shard(model: nn.Module, world: World) -> None:
        shard_by_sequence(model, world)
        enable_symm_mem_for_group(world.mesh.get_group().group_name)

    with config.patch(_micro_pipeline_tp=True):
        recording = train("cuda", shard)
    assert ops(recording) == [
        ("forward", "fused_all_gather_matmul", 16384),
        ("forward", "fused_matmul_reduce_scatter", 65536),
        ("backward", "fused_all_gather_matmul", 16384),
    ]


class TwoGathers(nn.Module):
    """Gathers its two weights, as a compiled FSDP would."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.first = nn.Parameter(torch.empty(16, 64))
        self.second = nn.Parameter(torch.empty(16, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = funcol.all_gather_tensor(self.first, 0, self.group)
        return x @ first @ funcol.all_gather_tensor(self.second, 0, self.group)


@BOTH
@pytest.mark.parametrize(("bucketing", "sizes"), [("none", [4096, 4096]), ("all", [8192])])
def test_bucketed_gathers(device: str, bucketing: str, sizes: list[int]) -> None:
    with simulate(mesh={"x": 4}, device=device) as world:
        with torch.device("meta"):
            model = TwoGathers(world.mesh.get_group())
        world.materialize(model)
        model.compile()
        with (
            config.patch(bucket_all_gathers_fx=bucketing),
            trace(model) as t,
            torch.no_grad(),
        ):
            model(torch.randn(4, 64, device=device))
    assert [size for _, _, size in ops(t.recording)] == sizes


@BOTH
@pytest.mark.parametrize("buckets", [False, True])
def test_overlapped_collectives_go_by_estimates(device: str, buckets: bool) -> None:
    section = "aten_distributed_optimizations"
    if not hasattr(config, section):
        pytest.skip("this torch does not overlap collectives with ops in a graph")
    options = {f"{section}.enable_overlap_scheduling": True}
    options[f"{section}.collective_bucketing"] = buckets
    with config.patch(options), pytest.warns(UserWarning, match="estimates for an H200"):
        recording = train(device, shard_by_sequence)
    assert [op for _, op, _ in ops(recording)].count("all_gather_into_tensor") == 2


@pytest.mark.parametrize("devices", [["cpu", "cuda", "cpu"], ["cuda", "cpu", "cuda"]], ids=str)
def test_one_class_is_compiled_in_worlds_on_different_devices(devices: list[str]) -> None:
    recordings = [train(device, shard_by_sequence) for device in devices]
    assert [len(ops(recording)) for recording in recordings] == [3, 3, 3]
    assert [c.cause for c in recordings[1].collectives] == [
        Compiled(graph="forward"),
        Compiled(graph="forward"),
        Compiled(graph="backward"),
    ]


def test_one_function_is_compiled_for_both_devices_of_a_world() -> None:
    double = torch.compile(lambda x: x * 2)
    with simulate(mesh={"x": 4}, device="cuda"):
        devices = [double(torch.ones(2, device=device)).device.type for device in ("cpu", "cuda")]
        assert devices == ["cpu", "cuda"]
        with torch.device("meta"):  # a mode that an error in a guard would leave disabled
            assert torch.ones(2).is_meta


# torch.compile itself sets this off where it looks at a hooked input that is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@BOTH
def test_ops_between_two_graphs_are_not_compiled(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    def shard(model: nn.Module, world: World) -> None:
        for layer in model.children():
            fully_shard(layer, mesh=world.mesh)
            layer.compile()

    train(device, shard, disable=True)
    assert "recompile_limit" not in caplog.text


def test_what_was_compiled_in_a_world_is_not_used_on_data() -> None:
    train("cuda", lambda model, world: None)
    model = FeedForward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model.compile()
    assert model(torch.ones(1, 64))[0, 0].item() == 0.5 * 128 * 32


def test_no_processes_are_started_to_compile_kernels() -> None:
    counts: list[int | None] = []

    def note_threads(graph: torch.fx.Graph) -> None:
        counts.append(config.compile_threads)

    with config.patch(post_grad_custom_post_pass=note_threads, compile_threads=4):
        train("cuda", lambda model, world: None)
    assert set(counts) == {1}
