"""Every place where torch chooses an op or a collective by the device, in a simulated CUDA world.

`tests/device_tables.py` maps the tests here, and in the other files about simulated CUDA devices,
to the functions of torch whose CUDA branch they take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as autograd_collectives
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._inductor import compile_fx
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import DefaultDeviceType, checkpoint

from device_branches import find_device_branches
from device_tables import TESTED, WITHOUT_EFFECT
from shardscope import World, simulate, trace
from shardscope.errors import WorldError

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has answers of its own"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # as Inductor loads
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning"),
]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has answers of its own")


def is_listed(branch: str, listed: set[str]) -> bool:
    return branch in listed or any(
        pattern.endswith("*") and branch.startswith(pattern[:-1]) for pattern in listed
    )


def test_every_function_of_torch_that_branches_on_a_device_is_listed() -> None:
    listed = {
        branch for table in (TESTED, WITHOUT_EFFECT) for row in table.values() for branch in row
    }
    assert not sorted(branch for branch in find_device_branches() if not is_listed(branch, listed))


def test_every_listed_test_exists() -> None:
    folder = Path(__file__).parent
    for name in TESTED:
        file, _, test = name.rpartition("::")
        assert f"def {test}(" in (folder / (file or Path(__file__).name)).read_text(), name


@pytest.fixture
def world() -> Iterator[World]:
    torch.compiler.reset()
    with simulate(mesh={"x": 4}, device="cuda") as world:
        yield world


class Ops(TorchDispatchMode):
    """Lists the ops that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(op))
        return op(*args, **(kwargs or {}))


def on_cuda(*shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", **options)


def trainable(*shape: int, **options: Any) -> torch.Tensor:
    return on_cuda(*shape, **options).requires_grad_()


def list_collectives(run: Callable[[], object]) -> list[str]:
    with trace() as t:
        run()
    return [collective.op.partition(".")[2] for collective in t.recording.collectives]


def list_ops(run: Callable[[], torch.Tensor], *parts: str) -> list[str]:
    """The ops of a forward and its backward that have one of the parts in their name."""
    with Ops() as ops:
        result = run()
        result.backward(torch.ones_like(result))
    return [name for name in ops.names if any(part in name for part in parts)]


class TestCollectives:
    @pytest.mark.parametrize(
        ("gather", "ops"),
        [
            (
                lambda x: torch.stack(autograd_collectives.all_gather(x)),
                ["allgather_", "reduce_scatter_"],
            ),
            (
                lambda x: autograd_collectives._all_gather_base(on_cuda(16, 4), x),
                ["_allgather_base_", "_reduce_scatter_base_"],
            ),
        ],
        ids=["list", "tensor"],
    )
    @pytest.mark.filterwarnings("ignore:.*is a private function:FutureWarning")
    def test_gathers_with_gradients_are_reduced_and_scattered_in_backward(
        self, world: World, gather: Callable[[torch.Tensor], torch.Tensor], ops: list[str]
    ) -> None:
        assert list_collectives(lambda: gather(trainable(4, 4)).sum().backward()) == ops

    @pytest.mark.parametrize(
        ("device", "ops"), [("cuda", ["alltoall_"] * 2), ("cpu", ["scatter_"] * 8)]
    )
    def test_exchanges_with_gradients_are_all_to_all(self, device: str, ops: list[str]) -> None:
        """Gloo scatters from each rank in turn; torch chooses by the name of the backend."""

        def exchange() -> None:
            x = torch.ones(4, 4, device=device, requires_grad=True)
            empty = [torch.empty(1, 4, device=device) for _ in range(4)]
            torch.cat(autograd_collectives.all_to_all(empty, list(x.chunk(4)))).sum().backward()

        with simulate(mesh={"x": 4}, device=device):
            assert list_collectives(exchange) == ops

    def test_backends_are_those_that_were_asked_for(self, world: World) -> None:
        assert dist.get_backend() == dist.get_backend(world.mesh.get_group()) == "nccl"
        assert dist.get_backend(dist.new_group([0, 1])) == "nccl"
        assert dist.get_backend(dist.new_group([0, 1], backend="gloo")) == "gloo"
        with trace() as t:
            dist.barrier()
        assert {group.backend for group in t.recording.groups} == {"fake"}

    def test_the_backend_of_a_cpu_world_is_gloo(self) -> None:
        before = dist.get_backend
        with simulate(mesh={"x": 4}):
            assert dist.get_backend() == "gloo"
            assert list_collectives(dist.monitored_barrier) == ["barrier"]
        assert dist.get_backend is before

    def test_monitored_barriers_need_a_group_of_gloo(self, world: World) -> None:
        if torch.__version__ < (2, 14):  # later versions do not check
            with pytest.raises(ValueError, match="only implemented for GLOO"):
                dist.monitored_barrier()
        group = dist.new_group(backend="gloo")
        assert list_collectives(lambda: dist.monitored_barrier(group)) == ["barrier"]

    def test_messages_of_a_batch_and_barriers(self, world: World) -> None:
        def communicate() -> None:
            batch = [dist.P2POp(dist.isend, on_cuda(2), 1), dist.P2POp(dist.irecv, on_cuda(2), 1)]
            for work in dist.batch_isend_irecv(batch):
                work.wait()
            dist.barrier()

        assert list_collectives(communicate) == ["send", "recv_", "barrier"]

    def test_broadcast_of_float8(self, world: World) -> None:
        tensor = torch.empty(4, device="cuda").to(torch.float8_e4m3fn)
        with trace() as t:
            dist.broadcast(tensor, 0)
        (collective,) = t.recording.collectives
        assert (str(collective.kind), collective.input_bytes) == ("broadcast", 4)

    def test_subgroups_are_the_devices_of_a_host(self) -> None:
        with simulate(mesh={"x": 16}, rank=9, device="cuda"):
            own, every = dist.new_subgroups()
            assert dist.get_process_group_ranks(own) == list(range(8, 16))
            assert len(every) == 2

    def test_objects_are_sent_as_tensors_of_the_device(self, world: World) -> None:
        with trace() as t:
            dist.broadcast_object_list(["a", "b"], 0)
            dist.send_object_list(["c"], 1)
        kinds = [str(collective.kind) for collective in t.recording.collectives]
        assert kinds == ["broadcast", "broadcast", "send", "send"]

    def test_ddp_on_a_device(self, world: World) -> None:
        layers = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).cuda()
        model = DistributedDataParallel(
            nn.SyncBatchNorm.convert_sync_batchnorm(layers), device_ids=[0]
        )
        model.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)

        def train() -> None:
            for _ in range(4):
                model(torch.ones(2, 64)).sum().backward()  # the input is moved

        ops = list_collectives(train)
        assert ops.count("_allgather_base_") == 4
        assert ops.count("allreduce_") > 8  # of the statistics, and of factors of the gradients


class TestFsdp:
    def test_fsdp1_gathers_into_a_tensor(self, world: World) -> None:
        model = FullyShardedDataParallel(nn.Linear(8, 8), device_id=0)
        ops = list_collectives(lambda: model(on_cuda(2, 8)).sum().backward())
        assert ops == ["_allgather_base_", "_reduce_scatter_base_"]

    def test_gradient_scalers_are_enabled(self, world: World) -> None:
        scalers = torch.amp.GradScaler(), torch.cuda.amp.GradScaler(), ShardedGradScaler()
        assert all(scaler.is_enabled() for scaler in scalers)
        model = FullyShardedDataParallel(nn.Linear(8, 8), device_id=0)
        optimizer = torch.optim.SGD(model.parameters())

        def step() -> None:
            scalers[2].scale(model(on_cuda(2, 8)).sum()).backward()
            scalers[2].step(optimizer)

        ops = list_collectives(step)
        assert ops == ["_allgather_base_", "_reduce_scatter_base_", "allreduce_"]

    def test_state_dicts_are_gathered_on_the_device_and_offloaded(self, world: World) -> None:
        model = fully_shard(nn.Linear(8, 8, device="cuda"), mesh=world.mesh)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        with trace() as t:
            state = get_model_state_dict(model, options=options)
        assert [str(c.kind) for c in t.recording.collectives] == ["all_gather"] * 2
        assert {tensor.device.type for tensor in state.values()} == {"cpu"}


class TestDTensor:
    def test_dtensors_are_moved_to_the_device_of_their_mesh(self, world: World) -> None:
        host = torch.ones(4, 4)
        local = DTensor.from_local(host, world.mesh, [Shard(0)]).to_local()
        whole = distribute_tensor(host, world.mesh, [Replicate()]).to_local()
        assert local.device.type == whole.device.type == "cuda"

    def test_random_ops_on_dtensors_draw_by_offsets(self, world: World) -> None:
        x = DTensor.from_local(on_cuda(4, 4), world.mesh, [Shard(0)])
        assert functional.dropout(x, 0.5).to_local().device.type == "cuda"
        if torch.__version__ >= (2, 13):  # earlier ones cannot trace random ops on DTensors
            compiled = torch.compile(lambda x: functional.dropout(x, 0.5) * 2)
            assert compiled(x).placements == (Shard(0),)

    def test_costs_of_redistribution_are_of_hosts_with_eight_devices(self) -> None:
        def read_bandwidths(device: str) -> list[float]:
            with simulate(mesh={"dp": 2, "tp": 8}, device=device) as world:
                return MeshTopoInfo.build_from_mesh(world.mesh).mesh_dim_bandwidth

        between_hosts, within_host = read_bandwidths("cuda")
        assert within_host > between_hosts
        assert len(set(read_bandwidths("cpu"))) == 1


class TestOptimizers:
    @pytest.mark.parametrize(
        "name",
        ["Adadelta", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad"],
    )
    @pytest.mark.parametrize("foreach", [None, False])
    def test_optimizers_choose_lists_of_tensors_and_count_steps_on_the_device(
        self, world: World, name: str, foreach: bool | None
    ) -> None:
        options = {} if name == "Adagrad" else {"capturable": True}
        parameters = [nn.Parameter(on_cuda(4, 4)) for _ in range(2)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = getattr(torch.optim, name)(parameters, foreach=foreach, **options)
        with Ops() as ops:
            optimizer.step()
        assert any("_foreach" in op for op in ops.names) == (foreach is None)
        if options:
            steps = [state["step"] for state in optimizer.state.values()]
            assert {step.device.type for step in steps} == {"cuda"}

    def test_compiled_optimizers_count_steps_on_the_device(self, world: World) -> None:
        model = nn.Linear(4, 4).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        model(on_cuda(2, 4)).sum().backward()
        torch.compile(lambda: optimizer.step())()
        states = list(optimizer.state.values())
        assert {state["step"].device.type for state in states} == {"cuda"}
        assert {state["exp_avg"].device.type for state in states} == {"cuda"}

    def test_averages_and_norms_are_of_lists_of_tensors(self, world: World) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).cuda()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        average.update_parameters(model)
        model(on_cuda(2, 4)).sum().backward()
        with Ops() as ops:
            average.update_parameters(model)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        names = [name.partition(".")[2] for name in ops.names if "_foreach" in name]
        assert {"_foreach_lerp_.Scalar", "_foreach_norm.Scalar"} <= set(names)


class Half(torch.autograd.Function):
    """Under autocast on CUDA, its input is float16."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float16)
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class TestModes:
    def test_custom_functions_cast_their_inputs(self, world: World) -> None:
        with torch.autocast("cuda"):
            assert Half.apply(on_cuda(2)).dtype == torch.float16
        assert Half.apply(on_cuda(2)).dtype == torch.float32

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_checkpoints_without_tensors_recompute_under_autocast(
        self, use_reentrant: bool
    ) -> None:
        """No argument is on the device: torch asks for the accelerator, and remembers it."""
        DefaultDeviceType.set_device_type("cpu")
        dtypes: list[torch.dtype] = []

        def run(scale: torch.Tensor) -> torch.Tensor:
            hidden = layer(on_cuda(2, 8))
            dtypes.append(hidden.dtype)
            return hidden * scale

        with simulate(mesh={"x": 4}, device="cuda"):
            layer = nn.Linear(8, 8).cuda()
            scale = torch.ones((), requires_grad=True)
            with torch.autocast("cuda", torch.bfloat16):
                output = checkpoint(run, scale, use_reentrant=use_reentrant)
            output.sum().backward()
        assert dtypes == [torch.bfloat16] * 2
        assert DefaultDeviceType.get_device_type() == "cpu"

    @without_gpu
    def test_forked_random_states_are_of_all_devices(self, world: World) -> None:
        with (
            pytest.warns(UserWarning, match="you have 8 available devices"),
            torch.random.fork_rng(),
        ):
            assert on_cuda(2).device.type == "cuda"

    def test_tensors_saved_on_the_host_come_back(self, world: World) -> None:
        x = trainable(4, 4)
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            loss = (x * x).sum()
        loss.backward()
        assert x.grad is not None
        assert x.grad.device.type == "cuda"


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class TestOps:
    @pytest.mark.parametrize(
        ("run", "kernel"),
        [
            (
                lambda: functional.pad(trainable(1, 2, 4, 4), (1, 1, 1, 1), mode="replicate"),
                "replication_pad",
            ),
            (
                lambda: functional.interpolate(
                    trainable(1, 2, 4, 4), scale_factor=2, mode="bilinear"
                ),
                "upsample",
            ),
            (
                lambda: functional.max_pool3d(trainable(1, 2, 4, 4, 4), 2, return_indices=True)[0],
                "max_pool3d",
            ),
        ],
        ids=["pad", "interpolate", "max_pool3d"],
    )
    def test_deterministic_ops_are_composed(
        self, world: World, run: Callable[[], torch.Tensor], kernel: str
    ) -> None:
        if kernel == "max_pool3d" and torch.__version__ < (2, 13):
            pytest.skip("this torch has no deterministic max_pool3d")
        with deterministic():
            assert list_ops(run, kernel) == []
        if kernel != "max_pool3d":
            assert list_ops(run, kernel) != []

    @pytest.mark.parametrize("is_compiled", [False, True])
    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
    def test_flex_attention_is_trained(self, world: World, is_compiled: bool) -> None:
        mask = create_block_mask(lambda b, h, query, key: query >= key, None, None, 128, 128)
        assert mask.kv_indices.device.type == "cuda"
        attend: Any = torch.compile(flex_attention) if is_compiled else flex_attention
        x = trainable(2, 2, 128, 16)
        attend(x, x, x, block_mask=mask).sum().backward()
        assert x.grad is not None

    def test_attention_of_sequences_of_different_lengths(self, world: World) -> None:
        varlen = pytest.importorskip("torch.nn.attention.varlen")
        ends = torch.tensor([0, 32, 64], dtype=torch.int32, device="cuda")
        x = trainable(64, 4, 16, dtype=torch.bfloat16)
        ops = list_ops(lambda: varlen.varlen_attn(x, x, x, ends, ends, 32, 32), "varlen")
        assert ops == [
            "torch_attn._varlen_attn.default",
            "torch_attn._varlen_attn_backward.default",
        ]

    def test_chunked_cross_entropy_is_one_op(self, world: World) -> None:
        if not hasattr(functional, "linear_cross_entropy"):
            pytest.skip("this torch has no linear_cross_entropy")
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=4)
        x, weight = (trainable(rows, 16, dtype=torch.bfloat16) for rows in (8, 32))
        target = torch.zeros(8, dtype=torch.long, device="cuda")
        (op, *rest) = list_ops(
            lambda: functional.linear_cross_entropy(x, weight, target, options=options),
            "torch_nn.",
            "mm.",
        )
        assert (op, rest) == ("torch_nn._linear_cross_entropy_batch_chunked.default", [])

    def test_scans_combine_pointwise(self, world: World) -> None:
        scanned = associative_scan(torch.add, on_cuda(4, 4), 0, combine_mode="pointwise")
        assert scanned.device.type == "cuda"

    @without_gpu
    def test_data_parallel_is_refused(self, world: World) -> None:
        with pytest.raises(WorldError, match=r"Use torch\.nn\.parallel\.DistributedDataParallel"):
            nn.DataParallel(nn.Linear(4, 4).cuda())

    @pytest.mark.parametrize(
        ("run", "ops"),
        [
            (
                lambda: functional.softmax(trainable(4, 4, dtype=torch.float16), -1, torch.float32),
                ["_softmax", "_softmax_backward_data"],
            ),
            (
                lambda: functional.log_softmax(
                    trainable(4, 4, dtype=torch.float16), -1, dtype=torch.float32
                ),
                ["_log_softmax", "_log_softmax_backward_data"],
            ),
            (
                lambda: functional.grid_sample(
                    trainable(1, 2, 4, 4), on_cuda(1, 3, 5, 2), align_corners=True
                ),
                ["cudnn_grid_sampler", "cudnn_grid_sampler_backward"],
            ),
            (
                lambda: nn.LSTMCell(8, 8).cuda()(on_cuda(3, 8))[0],
                ["_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward_impl"],
            ),
            (
                lambda: nn.GRUCell(8, 8, bias=False).cuda()(on_cuda(3, 8)),
                ["_thnn_fused_gru_cell", "_thnn_fused_gru_cell_backward"],
            ),
            *(
                (make, ["_cudnn_rnn", "_cudnn_rnn_backward"])
                for make in (
                    lambda: nn.LSTM(8, 6, 2, proj_size=3).cuda()(on_cuda(5, 3, 8))[0],
                    lambda: nn.GRU(8, 6, bidirectional=True, dropout=0.1).cuda()(on_cuda(5, 8))[0],
                    lambda: nn.RNN(8, 6, batch_first=True).cuda()(on_cuda(5, 3, 8))[0],
                    lambda: nn.RNN(8, 6, nonlinearity="relu", bias=False).cuda()(on_cuda(5, 8))[0],
                )
            ),
        ],
        ids=[
            *("softmax", "log_softmax", "grid_sampler", "lstm_cell", "gru_cell"),
            *("lstm", "gru", "rnn_tanh", "rnn_relu"),
        ],
    )
    @pytest.mark.filterwarnings("ignore:dropout option adds dropout:UserWarning")
    def test_kernels_that_cpp_chooses(
        self, world: World, run: Callable[[], torch.Tensor], ops: list[str]
    ) -> None:
        found = list_ops(run, "softmax", "grid_sampler", "_rnn", "lstm", "gru", "_to_copy")
        found = [name for name in found if "_to_copy" not in name or "softmax" in ops[0]]
        assert [name.split(".")[1] for name in found] == ops

    @pytest.mark.parametrize(
        ("run", "expected"),
        [
            (lambda: torch.ops.aten.log_sigmoid_forward(on_cuda(4))[1].shape, (0,)),
            (
                lambda: (
                    torch.ops.aten._embedding_bag(
                        on_cuda(10, 4), on_cuda(6).long(), torch.tensor([0, 3], device="cuda")
                    )[3].shape
                ),
                (0,),
            ),
            (
                lambda: (
                    torch.ops.aten.native_layer_norm(
                        on_cuda(2, 4, dtype=torch.bfloat16), [4], None, None, 1e-5
                    )[1].dtype
                ),
                torch.float32,
            ),
            (lambda: on_cuda(2, 4, dtype=torch.float16).cos().dtype, torch.float16),
        ],
        ids=["log_sigmoid", "embedding_bag", "layer_norm", "cos"],
    )
    def test_results_have_the_shapes_and_dtypes_of_cuda(
        self, world: World, run: Callable[[], object], expected: object
    ) -> None:
        assert run() == expected

    def test_recurrent_layers_follow_autocast_and_the_switch_of_cudnn(self, world: World) -> None:
        layer = nn.LSTM(8, 8).cuda()
        with torch.autocast("cuda", torch.float16):
            output = layer(on_cuda(2, 3, 8))[0]
        output.sum().backward()
        assert (output.dtype, layer.weight_ih_l0.grad.dtype) == (torch.float16, torch.float32)
        with torch.backends.cudnn.flags(enabled=False):
            assert "_cudnn" not in str(list_ops(lambda: layer(on_cuda(2, 3, 8))[0], "rnn"))

    def test_recurrent_layers_have_no_gradients_in_inference(self, world: World) -> None:
        output, _ = nn.GRU(8, 8).cuda().eval()(on_cuda(2, 3, 8))
        with pytest.raises(RuntimeError, match="in training mode only"):
            output.sum().backward()


Node = tuple[str, str]  # an op and the device it is called with, if any


def list_compiled(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> list[Node]:
    """The ops of a function's graphs, with their devices, after Inductor's passes."""
    nodes: list[Node] = []
    run_passes = compile_fx._recursive_post_grad_passes

    def record(graph: torch.fx.GraphModule, **options: Any) -> None:
        run_passes(graph, **options)
        for node in graph.graph.nodes:
            nodes.append((str(node.target), str(node.kwargs.get("device", ""))))

    with patch.object(compile_fx, "_recursive_post_grad_passes", record):
        output = torch.compile(function)(*args)
        if output.requires_grad:
            output.sum().backward()
    return nodes


class TestCompiled:
    def test_passes_over_compiled_graphs(self, world: World) -> None:
        def run(
            x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, single: torch.Tensor
        ) -> torch.Tensor:
            x = functional.linear(x, weight, bias).relu().softmax(-1)
            return x[torch.arange(4) - 1] + torch.bmm(single, single)

        nodes = list_compiled(run, on_cuda(4, 4), on_cuda(4, 4), on_cuda(4), on_cuda(1, 4, 4))
        names = [name for name, _ in nodes]
        assert "aten.addmm.default" not in names  # the bias is added with what follows
        assert "aten.bmm.default" not in names
        assert names.count("aten.mm.default") == 2
        assert "prims.prepare_softmax_online.default" in names
        assert ("prims.iota.default", "cuda:0") in nodes

    def test_gradients_of_biases_of_compiled_convolutions_are_sums(self, world: World) -> None:
        layer = nn.Conv2d(3, 4, 3).cuda()
        names = [name for name, _ in list_compiled(lambda x: layer(x).relu(), on_cuda(2, 3, 8, 8))]
        assert "aten.convolution_backward.default" in names
        assert "aten.sum.dim_IntList" in names

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
    def test_attention_written_as_products_is_fused(self, world: World, dtype: torch.dtype) -> None:
        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return torch.matmul((query @ key.transpose(-2, -1) / 4.0).softmax(-1), value)

        nodes = list_compiled(attend, *(on_cuda(2, 4, 8, 16, dtype=dtype) for _ in range(3)))
        # Not in float32, unless TF32 is allowed: the fused kernels would use it.
        is_fused = any("scaled_dot_product_cudnn" in name for name, _ in nodes)
        assert is_fused == (dtype is torch.bfloat16)

    def test_compiled_checkpoints_draw_twice_from_the_same_state(self, world: World) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).cuda()
        x = trainable(2, 8)
        torch.compile(lambda x: checkpoint(model, x, use_reentrant=False))(x).sum().backward()
        assert x.grad is not None
