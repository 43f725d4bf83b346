"""`simulate(device="cuda")` on a machine without a GPU: torch decides as it does for CUDA."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.guards import GuardManagerWrapper
from torch.distributed import checkpoint as checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, rand
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shardscope import Recording, World, memory, phases, simulate, trace
from shardscope.errors import WorldError

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has answers of its own")


@pytest.fixture
def world() -> Iterator[World]:
    with simulate(mesh={"tp": 4}, device="cuda") as world:
        yield world


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def kinds(recording: Recording) -> list[str]:
    return [str(collective.kind) for collective in recording.collectives]


class Ops(TorchDispatchMode):
    """Lists the ops that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(op))
        return op(*args, **(kwargs or {}))


class Attention(nn.Module):
    """Self-attention over 4 heads of 16."""

    def __init__(self, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(64, 64, dtype=dtype) for _ in range(3))
        self.out = nn.Linear(64, 64, dtype=dtype)

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, 16)).transpose(1, 2) for project in self.qkv)
        mixed = functional.scaled_dot_product_attention(q, k, v, **options)
        return self.out(mixed.transpose(1, 2).flatten(2))


class TestDecisions:
    """Each decision that torch makes by the device type."""

    @pytest.mark.parametrize(
        ("device", "kind", "num_bytes"),
        [("cuda", "all_to_all", 3 * 2**20), ("cpu", "all_gather", 3 * 2**22)],
    )
    def test_moving_a_shard_to_another_dim(self, device: str, kind: str, num_bytes: int) -> None:
        with simulate(mesh={"tp": 4}, device=device) as world:
            world.materialize(on_meta(lambda: nn.Linear(1, 1)))
            local = torch.empty(1024, 1024, device=device)
            x = DTensor.from_local(local, world.mesh, [Shard(0)])
            with trace() as t:
                x.redistribute(world.mesh, [Shard(1)])
        (collective,) = t.recording.collectives
        assert (str(collective.kind), collective.wire_bytes) == (kind, num_bytes)
        facts = [gap.fact for gap in t.recording.gaps]
        assert len(facts) == (device == "cpu")
        assert all("on CUDA meshes it issues an all_to_all" in fact for fact in facts)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.1}])
    def test_attention_on_dtensors(
        self, world: World, dtype: torch.dtype, options: dict[str, Any]
    ) -> None:
        model = on_meta(lambda: Attention(dtype=dtype))
        columns = ColwiseParallel(use_local_output=False)
        plan = {"qkv.*": columns, "out": RowwiseParallel()}
        world.materialize(parallelize_module(model, world.mesh, plan))
        with trace(model) as t:
            model(torch.randn(2, 32, 64, dtype=dtype, device="cuda"), **options).sum().backward()
        owners = [(c.owner, str(c.kind)) for c in t.recording.collectives if c.dtype != "uint8"]
        assert owners == [("out", "all_reduce")]

    def test_context_parallel_attention(self, world: World) -> None:
        model = world.materialize(on_meta(Attention))
        x = torch.randn(2, 512, 64, device="cuda")
        with trace(model) as t, context_parallel(world.mesh, buffers=[x], buffer_seq_dims=[1]):
            assert x.shape[1] == 128
            model(x, is_causal=True).sum().backward()
        assert set(kinds(t.recording)) <= {"all_gather", "all_to_all", "send", "recv"}
        assert len(kinds(t.recording)) >= 4

    def test_what_is_computed_from_constants_is_on_the_device(self, world: World) -> None:
        index = torch.tensor([2, 0, 1], device="cuda")
        values, order = index.sort()
        assert {t.device.type for t in (index + 1, index[1:], values, order)} == {"cuda"}
        assert (index + 1).tolist() == [3, 1, 2]
        rows = torch.ones(3, 4, device="cuda")
        assert rows.gather(0, order.unsqueeze(1)).device.type == "cuda"

    def test_random_ops_on_dtensors(self, world: World) -> None:
        sharded = rand(8, 8, device_mesh=world.mesh, placements=[Shard(0)])
        assert (sharded.device.type, sharded.to_local().device.type) == ("cuda", "cuda")
        assert functional.dropout(sharded, 0.5).placements == (Shard(0),)

    def test_histogram_of_integers(self, world: World) -> None:
        experts = torch.zeros(8, dtype=torch.int64, device="cuda")
        assert torch.histc(experts, bins=4, min=0, max=3).dtype == torch.int64

    def test_fused_kernels(self, world: World) -> None:
        x = torch.randn(2, 8, 64, device="cuda", requires_grad=True)
        norm = nn.RMSNorm(64, device="cuda")
        assert "FusedRmsNorm" in type(norm(x).grad_fn).__name__
        assert "NativeDropout" in type(functional.dropout(x, 0.5).grad_fn).__name__
        q = x.unflatten(-1, (4, 16)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(q, q, q)
        assert "ScaledDotProductEfficientAttention" in type(mixed.grad_fn).__name__
        q = q.to(torch.bfloat16)
        mixed = functional.scaled_dot_product_attention(q, q, q)
        assert "ScaledDotProductCudnnAttention" in type(mixed.grad_fn).__name__

    @pytest.mark.parametrize(
        ("sizes", "first", "kernel"),  # as on an H200 with torch 2.11 and cuDNN 9.19
        [
            ((192, 128), None, "Cudnn"),
            ((192, 128), SDPBackend.FLASH_ATTENTION, "Cudnn"),
            ((192, 128), SDPBackend.EFFICIENT_ATTENTION, "Efficient"),
            ((128, 128), SDPBackend.FLASH_ATTENTION, "Flash"),
            ((576, 512), None, "Efficient"),
        ],
    )
    def test_attention_kernels_by_size_of_heads_and_priority(
        self, world: World, sizes: tuple[int, int], first: SDPBackend | None, kernel: str
    ) -> None:
        q, v = (
            torch.randn(2, 4, 8, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for size in sizes
        )
        rest = (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
        order = None if first is None else sdpa_kernel([first, *rest], set_priority=True)
        with order or nullcontext():
            mixed = functional.scaled_dot_product_attention(q, q, v)
        assert f"ScaledDotProduct{kernel}Attention" in type(mixed.grad_fn).__name__
        assert mixed.shape[-1] == sizes[1]

    def test_attention_without_a_kernel_is_refused_as_on_a_gpu(self, world: World) -> None:
        q = torch.randn(2, 4, 8, 16, device="cuda")
        with (
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
            pytest.raises(RuntimeError, match="No available kernel"),
        ):
            functional.scaled_dot_product_attention(q, q, q)

    @pytest.mark.parametrize("make_bias", [causal_lower_right, causal_upper_left])
    def test_attention_with_a_causal_bias(
        self, world: World, make_bias: Callable[[int, int], torch.Tensor]
    ) -> None:
        q, k = (torch.randn(2, 4, size, 16, device="cuda") for size in (8, 12))
        mixed = functional.scaled_dot_product_attention(q, k, k, attn_mask=make_bias(8, 12))
        assert (mixed.shape, mixed.device.type) == (q.shape, "cuda")

    def test_host_tensors_keep_the_kernels_of_the_cpu(self, world: World) -> None:
        x = torch.randn(2, 4, 8, 16, requires_grad=True)
        mixed = functional.scaled_dot_product_attention(x, x, x)
        assert "ForCpu" in type(mixed.grad_fn).__name__

    def test_optimizers_update_lists_of_tensors(self, world: World) -> None:
        model = world.materialize(on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(2, 4, device="cuda")).sum().backward()
        with Ops() as ops:
            optimizer.step()
        assert any("_foreach" in name for name in ops.names)

    def test_autocast_casts_the_ops_that_cuda_casts(self, world: World) -> None:
        model = world.materialize(on_meta(lambda: nn.Linear(8, 8)))
        with torch.autocast("cuda", torch.bfloat16):
            output = model(torch.randn(2, 8, device="cuda"))
            assert torch.is_autocast_enabled("cuda")
            assert (output.dtype, output.sum().dtype) == (torch.bfloat16, torch.float32)
        assert not torch.is_autocast_enabled("cuda")

    @pytest.mark.parametrize(
        ("run", "dtype"),
        [
            (lambda x: x.acos(), torch.float32),
            (lambda x: x.norm(dim=0), torch.float32),
            (lambda x: x.prod(), torch.float32),
            (lambda x: x.sum(dim=None), torch.float32),
            (lambda x: functional.mse_loss(x, x), torch.float32),
            (lambda x: torch.mv(x.float().outer(x.float()), x.float()), torch.bfloat16),
            (lambda x: torch.einsum("i,j->ij", x.float(), x.float()), torch.bfloat16),
            (lambda x: torch.addcmul(x, x, x.float()), torch.float32),
            (lambda x: torch.cat([x, x]), torch.bfloat16),
            (lambda x: torch.linalg.qr(x.outer(x).double())[0], torch.float64),
        ],
    )
    def test_autocast_has_the_policies_of_cuda(
        self, world: World, run: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
    ) -> None:
        x = torch.ones(8, device="cuda", dtype=torch.bfloat16)
        with torch.autocast("cuda", torch.bfloat16):
            assert run(x).dtype == dtype

    def test_autocast_refuses_what_it_refuses_on_cuda(self, world: World) -> None:
        x = torch.ones(8, device="cuda")
        with (
            torch.autocast("cuda", torch.bfloat16),
            pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"),
        ):
            functional.binary_cross_entropy(x, x)

    def test_batch_norm_is_of_cudnn(self, world: World) -> None:
        model = nn.BatchNorm2d(4, device="cuda")
        with Ops() as ops:
            model(torch.ones(2, 4, 3, 3, device="cuda"))
            model.bfloat16()(torch.ones(2, 4, 3, 3, device="cuda", dtype=torch.bfloat16))
        norms = [name for name in ops.names if "norm" in name]
        assert norms == ["aten.cudnn_batch_norm.default", "aten.native_batch_norm.default"]

    def test_fsdp_moves_the_inputs_of_its_root_to_the_device(self) -> None:
        with simulate(mesh={"dp": 2}, device="cuda") as world:
            model = fully_shard(on_meta(lambda: nn.Linear(8, 8)), mesh=world.mesh)
            world.materialize(model)
            assert model(torch.randn(2, 8)).device.type == "cuda"

    def test_the_default_mesh_of_fsdp_is_on_the_device(self) -> None:
        with simulate(mesh={"dp": 2}, device="cuda"):
            model = fully_shard(on_meta(lambda: nn.Linear(8, 8)))
            assert model.weight.device_mesh.device_type == "cuda"


class TestParallelisms:
    """What is known from CPU worlds, with the same collectives."""

    @pytest.mark.parametrize("mesh", [{"dp": 4}, {"replicate": 2, "shard": 2}])
    def test_fully_shard(self, mesh: dict[str, int]) -> None:
        def train(device: str) -> Recording:
            with simulate(mesh=mesh, device=device) as world:
                model = on_meta(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
                for layer in model:
                    fully_shard(layer, mesh=world.mesh)
                world.materialize(fully_shard(model, mesh=world.mesh))
                optimizer = torch.optim.AdamW(model.parameters())
                with trace(model) as t:
                    model(torch.randn(4, 64, device=device)).sum().backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
            return t.recording

        def facts(recording: Recording) -> list[tuple[Any, ...]]:
            return [
                (str(c.kind), str(c.phase), c.group, c.input_bytes, c.owner, c.cause)
                for c in recording.collectives
            ]

        assert facts(train("cuda")) == facts(train("cpu"))

    @pytest.mark.parametrize("fused", [False, True])
    def test_gradient_scalers_step_as_without_overflow(self, fused: bool) -> None:
        with simulate(mesh={"dp": 4}, device="cuda") as world:
            model = fully_shard(on_meta(lambda: nn.Linear(8, 8)), mesh=world.mesh)
            world.materialize(model)
            optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
            scaler = torch.amp.GradScaler("cuda")
            with trace(model) as t:
                scaler.scale(model(torch.randn(2, 8, device="cuda")).sum()).backward()
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            assert len(optimizer.state) == 2
        assert kinds(t.recording) == ["all_gather", "reduce_scatter", "all_reduce"]

    def test_parameters_that_fsdp_offloads_are_materialized_on_the_host(self) -> None:
        with simulate(mesh={"dp": 4}, device="cuda") as world:
            model = on_meta(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
            fully_shard(model[0], mesh=world.mesh, offload_policy=CPUOffloadPolicy())
            world.materialize(fully_shard(model, mesh=world.mesh))
            devices = [parameter.device.type for parameter in model.parameters()]
            assert devices == ["cpu", "cpu", "cuda", "cuda"]
            with trace(model) as t:
                model(torch.randn(2, 8, device="cuda")).sum().backward()
            assert model[0].weight.grad is not None
            assert model[0].weight.grad.device.type == "cpu"
        assert kinds(t.recording).count("reduce_scatter") == 2

    @pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
    def test_fsdp1_by_the_index_of_the_device(self) -> None:
        with simulate(mesh={"dp": 4}, device="cuda"):
            model = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.cuda.current_device())
            with trace(model) as t:
                model(torch.randn(2, 8, device="cuda")).sum().backward()
        assert kinds(t.recording) == ["all_gather", "reduce_scatter"]

    @pytest.mark.parametrize(
        ("use_reentrant", "phases"),
        [(False, ["forward", "backward"]), (True, ["forward", "recompute", "backward"])],
    )
    def test_checkpointing(self, world: World, use_reentrant: bool, phases: list[str]) -> None:
        model = on_meta(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)))
        parallelize_module(model, world.mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        world.materialize(model)
        x = torch.randn(2, 8, device="cuda", requires_grad=True)
        with trace(model) as t:
            checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
        reduced = [c for c in t.recording.collectives if str(c.kind) == "all_reduce"]
        assert [str(c.phase) for c in reduced] == phases

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_synchronized_batch_norm(self, world: World, dtype: torch.dtype) -> None:
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2)
        )
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model).to("cuda", dtype)
        with trace(model) as t:
            model(torch.randn(2, 3, 8, 8, device="cuda", dtype=dtype)).sum().backward()
        # The mean, the deviation and the count, in float32, and the two sums of the gradient.
        assert [
            (str(c.kind), str(c.phase), c.input_bytes, c.owner) for c in t.recording.collectives
        ] == [
            ("all_gather", "forward", (2 * 4 + 1) * 4, "1"),
            ("all_reduce", "backward", 2 * 4 * 4, "1"),
        ]
        assert model[1].weight.grad.dtype == model[0].weight.grad.dtype == dtype

    def test_lazy_modules_get_their_shapes_on_meta(self, world: World) -> None:
        model = on_meta(lambda: nn.Sequential(nn.LazyBatchNorm1d(), nn.LazyLinear(4)))
        model(torch.empty(2, 3, device="meta"))
        world.materialize(model)
        assert model(torch.ones(2, 3, device="cuda")).shape == (2, 4)

    @without_gpu
    def test_a_model_in_ddp_stays_as_it_is(self, world: World) -> None:
        model = DistributedDataParallel(nn.Linear(4, 4, device="cuda"))
        assert world.materialize(model)(torch.ones(2, 4, device="cuda")).shape == (2, 4)

    def test_memory_is_that_of_the_cpu_standing_for_a_gpu(self) -> None:
        def peak(device: str) -> int:
            with simulate(mesh={"dp": 4}, device=device) as world:
                model = on_meta(lambda: nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)))
                for layer in model:
                    fully_shard(layer, mesh=world.mesh)
                world.materialize(fully_shard(model, mesh=world.mesh))
                optimizer = torch.optim.AdamW(model.parameters())
                x = torch.randn(64, 512, device=device)
                return memory(
                    model, lambda: model(x).sum().backward(), optimizer
                ).profile.peak_bytes

        assert peak("cuda") == peak("cpu")


class TestTensors:
    """Tensors are on a CUDA device wherever Python looks."""

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.empty(2, device="cuda"),
            lambda: torch.tensor([1.0, 2.0], device="cuda:0"),
            lambda: torch.ones(2).cuda(),
            lambda: torch.ones(2).to("cuda"),
            lambda: torch.ones(2).to(0),
            lambda: torch.ones(2).to(torch.device("cuda"), torch.float16),
            lambda: torch.ones(2).to(device="cuda", non_blocking=True),
            lambda: torch.ones(2).to(torch.ones(1, device="cuda")),
            lambda: torch.ones(2).pin_memory().cuda(non_blocking=True),
            lambda: nn.Linear(2, 2).cuda().weight,
            lambda: nn.Linear(2, 2).to("cuda").half().weight,
            lambda: torch.ones(2, device="cuda").clone().view(1, 2) + 1,
        ],
    )
    @without_gpu
    def test_a_tensor_is_where_the_program_puts_it(
        self, world: World, make: Callable[[], torch.Tensor]
    ) -> None:
        tensor = make()
        assert tensor.device == torch.device("cuda", 0)
        assert (tensor.is_cuda, tensor.is_cpu, tensor.get_device()) == (True, False, 0)
        assert tensor.to("cuda") is tensor
        back = tensor.cpu()
        assert (back.device.type, back.is_cuda, back.get_device()) == ("cpu", False, -1)

    @without_gpu
    def test_devices_have_indices(self, world: World) -> None:
        torch.cuda.set_device(3)
        assert torch.empty(1, device="cuda").device.index == 3
        with torch.cuda.device(1):
            assert torch.empty(1, device="cuda").device.index == 1
        assert torch.empty(1, device="cuda:5").device.index == 5
        with pytest.raises(WorldError, match="has devices 0 to 7"):
            torch.cuda.set_device(8)

    def test_tensors_on_different_devices_do_not_mix(self, world: World) -> None:
        with pytest.raises(RuntimeError, match="cuda"):
            torch.ones(2, device="cuda") + torch.ones(2)
        assert (torch.ones(2, device="cuda") * torch.tensor(2.0)).device.type == "cuda"

    def test_gradients_are_on_the_device(self, world: World) -> None:
        model = nn.Linear(4, 4).to("cuda")
        model(torch.randn(2, 4, device="cuda")).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.device.type == "cuda"

    def test_tied_parameters_stay_tied_when_they_move(self, world: World) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        model.to("cuda")
        assert model[1].weight is model[0].weight

    def test_assigning_data_of_another_device_moves_the_tensor(self, world: World) -> None:
        parameter = nn.Parameter(torch.ones(2))
        parameter.data = parameter.data.to("cuda")
        assert parameter.device.type == "cuda"

    @without_gpu
    def test_values_that_python_gave_can_be_read_back(self, world: World) -> None:
        counts = torch.tensor([3, 5], device="cuda")
        assert counts.tolist() == [3, 5]
        assert int(torch.tensor(7).cuda()) == 7

    @without_gpu
    def test_an_op_that_has_only_a_kernel_runs_on_the_host(self, world: World) -> None:
        counts, edges = torch.histogram(torch.ones(4, device="cuda"), 3)
        assert (counts.shape, edges.device.type) == ((3,), "cuda")

    @without_gpu
    def test_other_threads_get_a_sentence(self, world: World) -> None:
        with pytest.raises(WorldError, match="on a machine without a GPU"):
            torch.cuda._lazy_init()


@without_gpu
class TestRuntime:
    """torch.cuda and torch.accelerator."""

    def test_the_device_has_properties(self, world: World) -> None:
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == torch.accelerator.device_count() == 8
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        assert torch.cuda.get_device_capability() == (9, 0)
        assert torch.cuda.get_device_properties(0).total_memory > 10**11
        assert torch.cuda.is_bf16_supported()

    def test_streams_and_events_order_nothing(self, world: World) -> None:
        stream = torch.cuda.Stream(priority=-1)
        with torch.cuda.stream(stream):
            assert torch.cuda.current_stream() is stream
            tensor = torch.ones(2, device="cuda")
            tensor.record_stream(stream)
        assert torch.cuda.current_stream() is torch.cuda.default_stream()
        torch.cuda.current_stream().wait_stream(stream)
        event = stream.record_event()
        event.synchronize()
        torch.cuda.synchronize()
        assert event.query()
        with pytest.raises(WorldError, match="elapsed_time"):
            event.elapsed_time(torch.cuda.Event())

    def test_a_call_without_an_answer_is_named(self, world: World) -> None:
        with pytest.raises(WorldError, match=r"torch\.cuda\.memory_snapshot\(\)"):
            torch.cuda.memory_snapshot()

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.device(1),
            lambda: torch.device(device=1),
            lambda: torch.zeros(2, device=1).device,
            lambda: torch.tensor([1.0], device=1).device,
            lambda: torch.empty_like(torch.ones(2), device=1).device,
            lambda: torch.ones(2).new_full((2,), 1.0, device=1).device,
            lambda: nn.Linear(2, 2, device=1).weight.device,
            lambda: nn.Linear(2, 2).to(device=1).weight.device,
            lambda: nn.Linear(2, 2, device="meta").to_empty(device=1).weight.device,
            lambda: torch.Generator(1).device,
            lambda: torch.Stream(1).device,
        ],
    )
    def test_a_device_is_named_by_its_index(
        self, world: World, make: Callable[[], torch.device]
    ) -> None:
        assert make() == torch.device("cuda", 1)

    def test_classes_of_devices_and_generators_are_still_known(self, world: World) -> None:
        assert isinstance(torch.ones(2).device, torch.device)
        assert type(torch.device("cpu")) == torch.device  # noqa: E721 - what is tested
        assert issubclass(torch.device, torch.device)
        assert isinstance(torch.default_generator, torch.Generator)
        assert not isinstance(3, torch.cuda.CUDAGraph)

    def test_generators_seed_what_is_drawn_on_the_device(self, world: World) -> None:
        generator = torch.Generator(device="cuda").manual_seed(7)
        assert (generator.device, generator.initial_seed()) == (torch.device("cuda", 0), 7)
        drawn = torch.randn(2, 3, device="cuda", generator=generator)
        assert drawn.device.type == "cuda"
        assert drawn.normal_(generator=generator).shape == (2, 3)
        assert torch.randperm(4, device="cuda", generator=generator).device.type == "cuda"
        restored = torch.Generator("cuda").set_state(generator.get_state())
        assert restored.initial_seed() == generator.clone_state().initial_seed() == 7
        assert torch.Generator().device.type == "cpu"
        assert len(torch.cuda.default_generators) == torch.cuda.device_count()

    def test_compiled_code_makes_tensors_on_the_device(self, world: World) -> None:
        def add(x: torch.Tensor) -> torch.Tensor:
            device = torch.device("cuda", 0)
            assert isinstance(x.device, torch.device)
            index = torch.arange(x.shape[0], device=0) + torch.zeros(4, device=device)
            return x + index + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)

        torch.compiler.reset()
        # From torch 2.15 on, dynamo breaks the graph at the device that this function makes.
        is_one_graph = torch.__version__ < (2, 15)
        for options in ({}, {"backend": "aot_eager", "dynamic": True}):
            compiled = torch.compile(add, fullgraph=is_one_graph, **options)
            result = compiled(torch.ones(4, device="cuda"))
            assert (result.device.type, result.shape) == ("cuda", (4,))

    def test_the_device_of_a_tensor_is_made_current(self, world: World) -> None:
        with torch.cuda.device_of(torch.ones(2, device="cuda:3")):
            assert torch.cuda.current_device() == 3
            with torch.cuda.device_of(torch.ones(2)):
                assert torch.cuda.current_device() == 3
        assert torch.cuda.current_device() == 0

    @pytest.mark.parametrize("name", ["CUDAGraph", "ExternalStream", "MemPool", "graph"])
    def test_an_object_without_an_answer_is_named(self, world: World, name: str) -> None:
        with pytest.raises(WorldError, match=rf"torch\.cuda\.{name}\(\).*Leave the call out"):
            getattr(torch.cuda, name)()

    def test_ranges_for_profilers_are_ignored(self, world: World) -> None:
        with torch.cuda.nvtx.range("step"):
            torch.cuda.profiler.start()
        torch.cuda.profiler.stop()
        assert torch.cuda.nvtx.range_push("step") == torch.cuda.nvtx.range_pop() == 0

    def test_properties_of_the_modelled_gpu(self, world: World) -> None:
        properties = torch.cuda.get_device_properties(0)
        assert (properties.shared_memory_per_block, properties.warp_size) == (48 * 1024, 32)
        assert properties.uuid != torch.cuda.get_device_properties(1).uuid
        assert not hasattr(properties, "luid")
        with pytest.raises(WorldError, match=r"get_device_properties\(\)\.luid.*Leave it out"):
            _ = properties.luid

    def test_lazy_modules_are_refused_off_the_meta_device(self, world: World) -> None:
        with pytest.raises(WorldError, match="call it with meta tensors before materialize"):
            nn.LazyLinear(4)

    def test_memory_statistics_are_those_of_the_allocator_model(self, world: World) -> None:
        """As torch 2.11 counted the same lines on an H200."""
        x = torch.ones(1000, 1000, device="cuda")
        y = x @ x
        del x
        statistics = torch.cuda.memory_stats()
        assert statistics["requested_bytes.all.current"] == 37_554_432
        assert statistics["requested_bytes.all.peak"] == 41_554_432
        assert statistics["inactive_split_bytes.all.allocated"] == 20_971_520
        assert statistics["inactive_split_bytes.all.freed"] == 4_000_256
        assert statistics["allocated_bytes.all.current"] == torch.cuda.memory_allocated()
        assert statistics["num_device_alloc"] == statistics["segment.all.peak"] == 2
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 54_525_952
        assert "|  36674 KiB |  40581 KiB |" in torch.cuda.memory_summary()
        del y


@without_gpu
def test_everything_is_as_before_when_the_world_has_ended() -> None:
    def look() -> dict[str, Any]:
        names = ("device", "is_cuda", "is_cpu", "to", "cuda", "get_device", "pin_memory")
        return {
            **{name: torch.Tensor.__dict__.get(name) for name in names},
            "cuda": dict(vars(torch.cuda)),
            "accelerator": dict(vars(torch.accelerator)),
            "fake": dict(vars(type(torch.empty(0)))),
            "autocast": dict(vars(torch.autocast)),
            "swap": torch.utils.swap_tensors,
            "torch": dict(vars(torch)),
            "nvtx": dict(vars(torch.cuda.nvtx)),
            "lazy": nn.parameter.UninitializedParameter.__new__,
            "guards": GuardManagerWrapper.check_verbose,
            "lift": torch._C._only_lift_cpu_tensors(),
        }

    before = look()
    with (
        suppress(ZeroDivisionError),
        simulate(mesh={"dp": 2}, device="cuda") as world,
    ):
        world.materialize(on_meta(lambda: nn.Linear(2, 2)))
        assert look() != before
        raise ZeroDivisionError
    assert look() == before
    assert not torch.cuda.is_available()
    assert torch.ones(2).device == torch.device("cpu")


@without_gpu
def test_a_cuda_mesh_in_a_cpu_world_is_refused() -> None:
    with (
        simulate(mesh={"dp": 2}),
        pytest.raises(WorldError, match='Simulate with device="cuda", which needs none'),
    ):
        init_device_mesh("cuda", (2,))


@without_gpu
@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.ones(2).cuda(),
        lambda: nn.Linear(2, 2).to("cuda"),
        lambda: torch.ones(2, device="cuda"),
        lambda: torch.cuda.set_device(0),
    ],
    ids=["cuda()", "to()", "device=", "set_device()"],
)
def test_cuda_in_a_cpu_world_is_explained(use: Callable[[], object]) -> None:
    with (
        pytest.raises((AssertionError, AttributeError, RuntimeError)) as error,
        simulate({"dp": 2}),
    ):
        use()
    assert 'Simulate with device="cuda", which needs none' in "".join(error.value.__notes__)


def test_attention_on_dtensors_of_a_cpu_world_names_the_device() -> None:
    op = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    with pytest.raises(NotImplementedError) as error, simulate(mesh={"tp": 4}):
        raise NotImplementedError(f"Operator {op} does not have a sharding strategy registered.")
    assert 'Simulate with device="cuda"' in "".join(error.value.__notes__)


@without_gpu
def test_phases_are_not_timed_on_a_device_that_is_not_there(world: World) -> None:
    with trace() as t, phases("load"), phases("copy", device="cuda"):
        torch.ones(2, device="cuda")
    assert {span.device for span in t.recording.spans} == {"cpu"}
    assert t.recording.gaps == ()


@without_gpu
def test_a_device_can_be_given_by_its_index_and_answers_what_programs_log() -> None:
    with simulate(mesh={"dp": 2}, device="cuda:0") as world:
        model = nn.Linear(2, 2).to(1)
        assert world.mesh.device_type == "cuda"
        assert model.weight.device == torch.device("cuda", 1)
        assert torch.cuda.Event(True).enable_timing
        assert torch.cuda.memory_stats(1)["active.all.current"] == 2
        assert torch.cuda.memory_allocated("cuda:1") == 1024


@without_gpu
def test_reading_values_with_numpy_is_explained() -> None:
    with (
        pytest.raises(RuntimeError, match="numpy") as error,
        simulate(mesh={"dp": 2}, device="cuda"),
    ):
        torch.ones(2, device="cuda").cpu().numpy()
    assert "--data" in "".join(error.value.__notes__)


@without_gpu
def test_tensors_without_data_are_copied_without_a_warning() -> None:
    script = (
        "import copy, torch, warnings; from shardscope import simulate\n"
        "warnings.simplefilter('error')\n"
        "with simulate(mesh={'dp': 2}, device='cuda'):\n"
        "    print(copy.deepcopy(torch.nn.Linear(2, 2, device='cuda')).weight.device)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "cuda:0\n", done.stderr


def test_modules_move_between_devices_and_dtypes_in_place() -> None:
    """Copied layers too, which torch keeps weak references to."""
    with simulate(mesh={"dp": 2}, device="cuda"):
        model = nn.Transformer(8, 2, 2, 1, 8, batch_first=True)
        weight = model.encoder.layers[1].linear1.weight
        weight.sum().backward()
        model.to("cuda", torch.bfloat16)
        assert model.encoder.layers[1].linear1.weight is weight
        assert (weight.device.type, weight.dtype) == ("cuda", torch.bfloat16)
        assert weight.grad is not None
        assert (weight.grad.device.type, weight.grad.dtype) == ("cuda", torch.bfloat16)
        assert {tensor.device.type for tensor in model.to("meta").parameters()} == {"meta"}
        model.to_empty(device="cuda")
        output = model(*torch.ones(2, 3, 2, 8, device="cuda", dtype=torch.bfloat16))
        output.sum().backward()
        assert output.device.type == "cuda"


@without_gpu
def test_a_compiled_model_in_a_device_context_stays_one_graph() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def add_ones(x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x) + torch.ones(8)

    with simulate(mesh={"dp": 2}, device="cuda"), torch.device("cuda"):
        result = torch.compile(add_ones, backend=backend, fullgraph=True)(torch.randn(4, 8))
    assert result.device.type == "cuda"
    assert len(graphs) == 1


@without_gpu
@pytest.mark.parametrize("is_built_before", [True, False])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_functions_that_make_tensors_are_scripted(
    monkeypatch: pytest.MonkeyPatch, is_built_before: bool
) -> None:
    def add_zeros(x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros(2, device=x.device) + torch.tensor(1.0)

    if not is_built_before:
        monkeypatch.setattr(torch.jit._builtins, "_builtin_table", None)
    with simulate(mesh={"dp": 2}, device="cuda"):
        assert torch.jit.script(add_zeros)(torch.ones(2, device="cuda")).device.type == "cuda"
    assert torch.jit._builtins._find_builtin(torch.zeros) == "aten::zeros"


def save_shards(model: nn.Module, path: Path) -> None:
    checkpointing.save(model.state_dict(), checkpoint_id=path)


@without_gpu
@pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize(
    "save", [lambda model, path: torch.save(model.state_dict(), path / "model.pt"), save_shards]
)
def test_saving_tensors_without_data_is_explained(
    save: Callable[[nn.Module, Path], None], tmp_path: Path
) -> None:
    before = torch.save

    def save_in_a_world() -> None:
        with simulate(mesh={"dp": 2}, device="cuda") as world:
            model = fully_shard(on_meta(lambda: nn.Linear(8, 8)), mesh=world.mesh)
            save(world.materialize(model), tmp_path)

    with pytest.raises(Exception, match=r"torch\.save|_local_scalar_dense") as caught:
        save_in_a_world()
    notes = getattr(caught.value, "__notes__", [])
    assert "add --data" in "".join([str(caught.value), *notes])
    assert torch.save is before


@without_gpu
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nested.nested_tensor([rows(2), rows(1)]),
        lambda: torch.nested.as_nested_tensor([rows(2), rows(1)]),
    ],
    ids=["nested_tensor", "as_nested_tensor"],
)
def test_strided_nested_tensors_are_refused_in_a_sentence(make: Callable[[], object]) -> None:
    with (
        simulate(mesh={"dp": 2}, device="cuda"),
        pytest.raises(WorldError, match=r"A nested tensor .* device=\"cpu\" .* --data\."),
    ):
        make()


@without_gpu
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")
def test_an_encoder_that_would_nest_its_input_names_the_option() -> None:
    with simulate(mesh={"dp": 2}, device="cuda"):
        layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, device="cuda")
        x, mask = torch.ones(2, 4, 8, device="cuda"), torch.zeros(2, 4, device="cuda").bool()
        with torch.no_grad(), pytest.raises(WorldError, match="enable_nested_tensor=False"):
            nn.TransformerEncoder(layer, 1).eval()(x, src_key_padding_mask=mask)
        with torch.no_grad():
            encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
            assert encoder(x, src_key_padding_mask=mask).shape == x.shape


def rows(num_rows: int) -> torch.Tensor:
    return torch.ones(num_rows, 3, device="cuda")


@without_gpu
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nested.nested_tensor([rows(2), rows(1)], layout=torch.jagged),
        lambda: torch.nested.as_nested_tensor([rows(2), rows(1)], layout=torch.jagged),
        lambda: torch.nested.as_nested_tensor(torch.ones(2, 3, 4), layout=torch.jagged),
        lambda: torch.nested.nested_tensor_from_jagged(rows(5), offsets=torch.tensor([0, 2, 5])),
        lambda: torch.nested.narrow(
            torch.ones(2, 6), 1, torch.tensor([0, 2]), torch.tensor([1, 2]), layout=torch.jagged
        ),
    ],
    ids=["nested_tensor", "as_nested_tensor", "of a dense tensor", "from_jagged", "narrow"],
)
def test_jagged_nested_tensors_are_refused_in_a_sentence(make: Callable[[], object]) -> None:
    with (
        simulate(mesh={"dp": 2}, device="cuda"),
        pytest.raises(WorldError, match=r"jagged nested tensor .* device=\"cpu\" .* --data\."),
    ):
        make()


def test_jagged_nested_tensors_with_data_are_made_in_a_simulated_world() -> None:
    with simulate(mesh={"dp": 2}):
        nested = torch.nested.nested_tensor(
            [torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged
        )
        assert nested.sum().item() == 9


@without_gpu
def test_lstm_runs_without_a_warning_about_cudnn(recwarn: pytest.WarningsRecorder) -> None:
    with simulate(mesh={"dp": 2}, device="cuda"):
        output, _ = nn.LSTM(4, 8).cuda()(torch.ones(2, 3, 4, device="cuda"))
    assert output.shape == (2, 3, 8)
    assert not [warning for warning in recwarn if "cuDNN" in str(warning.message)]
    assert "is_acceptable" not in vars(torch.backends.cudnn)
