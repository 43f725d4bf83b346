"""DDP without data, on a simulated CUDA device: the collectives are those of the CPU with data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from shardscope import Recording, simulate, trace
from shardscope.errors import WorldError
from shardscope.record import BucketReduce, Collective

pytestmark = pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has answers of its own")

WIDTH = 64
PARAMETER_BYTES = (2 * (WIDTH * WIDTH + WIDTH) + 2 * WIDTH) * 4


class Model(nn.Module):
    """Two layers around a batch norm, whose buffers are broadcast, and a layer that may be idle."""

    def __init__(self, *, has_idle_layer: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Linear(WIDTH, WIDTH) if has_idle_layer else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def record(
    device: str,
    *,
    make: Callable[[], nn.Module] = Model,
    set_up: Callable[[DistributedDataParallel], None] = lambda _: None,
    is_accumulating: bool = False,
    is_set_to_none: bool = True,
    num_steps: int = 3,
    **options: Any,
) -> Recording:
    """The construction of a DDP model and some steps of it, on rank 1."""
    with simulate({"dp": 2, "tp": 2}, rank=1, device=device) as world, trace() as t:
        group = world.mesh["dp"].get_group()
        ddp = DistributedDataParallel(make().to(device), process_group=group, **options)
        set_up(ddp)
        optimizer = torch.optim.AdamW(ddp.parameters())
        for step in range(num_steps):
            with ddp.no_sync() if is_accumulating and step == 0 else nullcontext():
                ddp(torch.ones(8, WIDTH, device=device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=is_set_to_none)
    return t.recording


def buckets(recording: Recording) -> list[Collective]:
    return [c for c in recording.collectives if isinstance(c.cause, BucketReduce)]


def make_with_idle_layer() -> nn.Module:
    return Model(has_idle_layer=True)


def compress(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


def factorize(ddp: DistributedDataParallel) -> None:
    state = powerSGD_hook.PowerSGDState(ddp.process_group, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


@without_gpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"gradient_as_bucket_view": True, "is_set_to_none": False},
        {"bucket_cap_mb": 0.01},
        {"broadcast_buffers": False},
        {"static_graph": True},
        {"static_graph": True, "make": make_with_idle_layer},
        {"find_unused_parameters": True, "make": make_with_idle_layer},
        {"is_accumulating": True},
        {"set_up": compress},
        {"set_up": factorize, "num_steps": 4},
    ],
    ids=lambda options: " ".join(options) or "default",
)
def test_collectives_are_those_of_ddp_with_data(options: dict[str, Any]) -> None:
    simulated, computed = (record(device, **options) for device in ("cuda", "cpu"))
    assert simulated.collectives == computed.collectives
    assert simulated.gaps == computed.gaps == ()
    assert buckets(simulated)


@without_gpu
def test_construction_verifies_and_broadcasts_the_model_and_each_step_reduces_it() -> None:
    recording = record("cuda", num_steps=1)
    kinds = [(str(c.kind), str(c.phase)) for c in recording.collectives]
    at_construction = [("all_gather", "outside")] + [("broadcast", "outside")] * 3
    assert kinds == [*at_construction, *[("broadcast", "forward")] * 2, ("all_reduce", "backward")]
    (bucket,) = buckets(recording)
    assert bucket.input_bytes == PARAMETER_BYTES
    assert bucket.cause == BucketReduce(
        bucket=0,
        parameters=(
            *("Model.first.weight", "Model.first.bias"),
            *("Model.norm.weight", "Model.norm.bias"),
            *("Model.last.weight", "Model.last.bias"),
        ),
    )


@without_gpu
def test_a_hook_reduces_in_bfloat16_as_it_may_on_cuda() -> None:
    def reduce_in_bfloat16(ddp: DistributedDataParallel) -> None:
        ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)

    version = torch.version.cuda  # None in builds for the CPU
    reduced = buckets(record("cuda", set_up=reduce_in_bfloat16))
    assert [(c.dtype, c.input_bytes) for c in reduced] == [("bfloat16", PARAMETER_BYTES // 2)] * 3
    assert torch.version.cuda == version


@without_gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_materialized_model_is_wrapped(device: str) -> None:
    with simulate({"dp": 2}, device=device) as world:
        with torch.device("meta"):
            model = Model()
        ddp = DistributedDataParallel(world.materialize(model))
        with trace(ddp) as t:
            ddp(torch.ones(8, WIDTH, device=device)).sum().backward()
    assert [bucket.input_bytes for bucket in buckets(t.recording)] == [PARAMETER_BYTES]


@without_gpu
def test_a_compiled_model_is_reduced() -> None:
    with simulate({"dp": 2}, device="cuda"):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).to("cuda")
        step = torch.compile(DistributedDataParallel(model), backend="aot_eager")
        with trace(model) as t:
            step(torch.ones(2, 4, device="cuda")).sum().backward()
    assert [(str(c.kind), c.input_bytes) for c in t.recording.collectives] == [
        ("all_reduce", (4 * 4 + 4 + 4 + 4) * 4)
    ]


@without_gpu
def test_buckets_take_no_memory() -> None:
    with simulate({"dp": 512}, device="cuda"):
        model = nn.Linear(1 << 20, 1 << 20, bias=False, device="cuda")  # 4 TiB
        ddp = DistributedDataParallel(model)
        with trace(ddp) as t:
            ddp(torch.ones(1, 1 << 20, device="cuda")).sum().backward()
    assert [bucket.input_bytes for bucket in buckets(t.recording)] == [4 << 40]


@without_gpu
def test_sparse_gradients_are_refused_with_a_way_out() -> None:
    with (
        pytest.raises(WorldError, match=r"sparse gradients .* Use sparse=False, or simulate with"),
        simulate({"dp": 2}, device="cuda"),
    ):
        DistributedDataParallel(nn.Embedding(4, 4, sparse=True, device="cuda"))


@without_gpu
def test_join_is_refused_with_a_note() -> None:
    with pytest.raises(Exception, match="_local_scalar_dense") as caught:  # noqa: PT012, SIM117
        with simulate({"dp": 2}, device="cuda"):
            ddp = DistributedDataParallel(nn.Linear(4, 4, device="cuda"))
            with ddp.join():
                ddp(torch.ones(2, 4, device="cuda"))
    assert any("DDP's join()" in note for note in caught.value.__notes__)


def test_torchs_reducer_is_left_as_it_was() -> None:
    def read() -> list[Any]:
        return [
            dist._verify_params_across_processes,
            *(vars(dist.Reducer)[name] for name in ("_rebuild_buckets", "_set_static_graph")),
            *(
                vars(DistributedDataParallel)[name]
                for name in ("__init__", "_build_params_for_reducer", "_check_comm_hook")
            ),
        ]

    before = read()
    with simulate({"dp": 2}, device="cuda"):
        pass
    assert all(now is then for now, then in zip(read(), before, strict=True))
