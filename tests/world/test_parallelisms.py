"""Sharded and replicated models take full training steps in a simulated world."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from shardscope import Recording, simulate, trace
from shardscope.record import BucketReduce, FullyShard

# torch 2.13 renames some collectives; the old names work in every version we support.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

WIDTH = 16
BYTES = 4 * (WIDTH * 2 * WIDTH * 2 + 2 * WIDTH + WIDTH)  # of MLP's parameters


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def meta_mlp() -> MLP:
    with torch.device("meta"):
        return MLP()


def train(model: nn.Module, *, steps: int = 1) -> Recording:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trace(model) as t:
        for _ in range(steps):
            model(torch.ones(4, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert t.recording.gaps == ()
    return t.recording


def summary(recording: Recording) -> list[tuple[str, str | None, int, str]]:
    return [(str(c.kind), c.axis, c.input_bytes, str(c.phase)) for c in recording.collectives]


@pytest.mark.parametrize("fake", [False, True])
def test_tensor_parallel(fake: bool) -> None:
    with simulate(mesh={"tp": 4}, rank=1) as world:
        model = meta_mlp() if fake else MLP()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, world.mesh, plan)
        recording = train(world.materialize(model) if fake else model)
        assert model.up.weight.to_local().shape == (2 * WIDTH // 4, WIDTH)
    assert summary(recording) == [("all_reduce", "tp", 4 * 4 * WIDTH, "forward")]


def test_sequence_parallel() -> None:
    with simulate(mesh={"tp": 2}, rank=1) as world:
        model = meta_mlp()
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
        parallelize_module(model, world.mesh, plan)
        recording = train(world.materialize(model))
    forward = [kind for kind, _, _, phase in summary(recording) if phase == "forward"]
    assert forward == ["all_gather", "reduce_scatter"]


@pytest.mark.parametrize("fake", [False, True])
def test_fsdp2(fake: bool) -> None:
    with simulate(mesh={"dp": 4}, rank=3) as world:
        model = meta_mlp() if fake else MLP()
        fully_shard(model.up, mesh=world.mesh)
        fully_shard(model, mesh=world.mesh)
        recording = train(world.materialize(model) if fake else model)
    assert {c.group for c in recording.collectives} == {"dp[0-3]"}
    # The root keeps its parameters between forward and backward; `up` gathers twice.
    assert [kind for kind, *_ in summary(recording)] == ["all_gather"] * 3 + ["reduce_scatter"] * 2
    assert {c.owner for c in recording.collectives} == {"", "up"}


def test_hsdp() -> None:
    with simulate(mesh={"replicate": 2, "shard": 4}, rank=5) as world:
        model = meta_mlp()
        fully_shard(model, mesh=world.mesh)
        recording = train(world.materialize(model))
    assert summary(recording) == [
        ("all_gather", "shard", BYTES // 4, "forward"),
        ("reduce_scatter", "shard", BYTES, "backward"),
        ("all_reduce", "replicate", BYTES // 4, "backward"),
    ]
    actions = [c.cause.action for c in recording.collectives if isinstance(c.cause, FullyShard)]
    assert actions == ["unshard", "reduce", "all_reduce"]


def test_fsdp2_with_tensor_parallel_on_every_rank() -> None:
    summaries = []
    for rank in range(4):
        with simulate(mesh={"dp": 2, "tp": 2}, rank=rank) as world:
            model = meta_mlp()
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model, world.mesh["tp"], plan)
            fully_shard(model, mesh=world.mesh["dp"])
            recording = train(world.materialize(model))
            summaries.append(summary(recording))
            groups = {"dp": f"dp[{rank % 2}-{rank % 2 + 2}/2]", "tp": f"tp[{rank - rank % 2}-"}
            for collective in recording.collectives:
                assert collective.group.startswith(groups[collective.axis or ""])
    assert [kind for kind, *_ in summaries[0]] == ["all_gather", "all_reduce", "reduce_scatter"]
    assert all(rank_summary == summaries[0] for rank_summary in summaries)


def test_fsdp2_with_tied_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(32, WIDTH)
            self.head = nn.Linear(WIDTH, 32, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(tokens))

    with simulate(mesh={"dp": 4}) as world:
        with torch.device("meta"):
            model = Tied()
        fully_shard(model, mesh=world.mesh)
        world.materialize(model)
        with trace(model) as t:
            model(torch.ones(4, dtype=torch.long)).sum().backward()
        assert isinstance(model.embed.weight.grad, DTensor)
        assert model.head.weight is model.embed.weight
    assert [c.input_bytes for c in t.recording.collectives] == [WIDTH * 32, WIDTH * 32 * 4]


def ddp_buckets(recording: Recording) -> list[tuple[str, ...]]:
    return [c.cause.parameters for c in recording.collectives if isinstance(c.cause, BucketReduce)]


ALL_PARAMETERS = ("up.weight", "up.bias", "down.weight", "down.bias")


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"broadcast_buffers": False}]
)
def test_ddp_reduces_its_buckets_in_each_of_two_steps(options: dict[str, Any]) -> None:
    with simulate(mesh={"dp": 4}, rank=2):
        recording = train(DistributedDataParallel(MLP(), **options), steps=2)
    assert [set(names) for names in ddp_buckets(recording)] == [set(ALL_PARAMETERS)] * 2


def test_ddp_rebuilds_small_buckets_after_the_first_step() -> None:
    with simulate(mesh={"dp": 4}):
        model = DistributedDataParallel(MLP(), bucket_cap_mb=0.001)
        recording = train(model, steps=2)
    first, *second = (set(names) for names in ddp_buckets(recording))
    assert first == set(ALL_PARAMETERS)
    assert second == [{"down.weight", "down.bias"}, {"up.weight", "up.bias"}]


def test_ddp_leaves_gradients() -> None:
    with simulate(mesh={"dp": 4}):
        model = DistributedDataParallel(MLP())
        model(torch.ones(4, WIDTH)).sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_ddp_with_unused_parameters() -> None:
    class Half(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(self.norm(x))

    with simulate(mesh={"dp": 4}):
        recording = train(DistributedDataParallel(Half(), find_unused_parameters=True), steps=2)
    # The buckets, and the bitmap by which ranks agree on what went unused.
    assert [kind for kind, *_ in summary(recording)] == ["all_reduce"] * 4
    assert [set(names) for names in ddp_buckets(recording)] == [set(ALL_PARAMETERS)] * 2


def reduce_by_hand(_, bucket):  # type: ignore[no-untyped-def] # DDP rejects postponed annotations
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


@pytest.mark.parametrize(
    ("hook", "dtype"),
    [(reduce_by_hand, "float32"), (default_hooks.fp16_compress_hook, "float16")],
)
def test_ddp_with_a_hook_written_in_python(hook: Callable[..., Any], dtype: str) -> None:
    with simulate(mesh={"dp": 4}):
        model = DistributedDataParallel(MLP())
        model.register_comm_hook(None, hook)
        recording = train(model, steps=2)
    reduces = [c for c in recording.collectives if c.kind == "all_reduce"]
    assert [c.dtype for c in reduces] == [dtype] * 2
    assert [set(names) for names in ddp_buckets(recording)] == [set(ALL_PARAMETERS)] * 2


def test_ddp_accumulates_gradients_without_reducing_them() -> None:
    with simulate(mesh={"dp": 4}):
        model = DistributedDataParallel(MLP())
        with trace(model) as t, model.no_sync():
            model(torch.ones(4, WIDTH)).sum().backward()
    assert t.recording.collectives == ()


def test_fsdp1() -> None:
    with simulate(mesh={"dp": 4}, rank=2):
        model = FullyShardedDataParallel(MLP(), device_id=torch.device("cpu"))
        recording = train(model)
    assert summary(recording) == [
        ("all_gather", "dp", BYTES // 4, "forward"),
        ("reduce_scatter", "dp", BYTES, "backward"),
    ]
    assert all(isinstance(c.cause, FullyShard) for c in recording.collectives)


def count_calls(mesh: dict[str, int]) -> int:
    """How many functions, of Python and C, a step calls that is not the world's first."""
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with simulate(mesh, rank=3) as world:
        with torch.device("meta"):
            model = MLP()
        parallelize_module(
            model, world.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        fully_shard(model, mesh=world.mesh["dp"])
        world.materialize(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for is_first in (True, False):
            sys.setprofile(None if is_first else count)
            try:
                model(torch.ones(2, 16)).sum().backward()
                optimizer.step()
            finally:
                sys.setprofile(None)
    return calls


def test_step_calls_no_function_for_each_rank() -> None:
    count_calls({"dp": 64, "tp": 4})  # what torch does once in a process
    small, large = (count_calls({"dp": size, "tp": 4}) for size in (64, 1024))
    assert abs(large - small) < 100, (small, large)  # where collections of garbage fall
