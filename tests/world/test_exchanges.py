"""Models that exchange activations by hand: expert parallel, and context parallel both ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

from shardscope import Recording, World, simulate, trace

# torch 2.13 renames some collectives; the old names work in every version we support.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

WIDTH = 16


class Experts(nn.Module):
    """Expert parallel: tokens go to the ranks of their experts and come back."""

    def __init__(
        self, group: dist.ProcessGroup, sent: Sequence[int] | None, received: Sequence[int] | None
    ) -> None:
        super().__init__()
        self.expert = nn.Linear(WIDTH, WIDTH, bias=False)
        self.group = group
        self.sent = None if sent is None else list(sent)
        self.received = None if received is None else list(received)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        there = funcol.all_to_all_single_autograd(x, self.received, self.sent, self.group)
        return funcol.all_to_all_single_autograd(
            self.expert(there), self.sent, self.received, self.group
        )


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(
    ("sent", "received"), [(None, None), ([1, 0, 2, 1], [1, 3, 0, 2])], ids=["even", "uneven"]
)
def test_expert_parallel(sent: list[int] | None, received: list[int] | None, fake: bool) -> None:
    with simulate(mesh={"ep": 4}) as world:
        with torch.device("meta" if fake else "cpu"):
            model = Experts(world.mesh.get_group(), sent, received)
        if fake:
            world.materialize(model)
        x = torch.ones(4, WIDTH, requires_grad=True)
        with trace(model) as t:
            output = model(x)
            output.sum().backward()
        assert output.shape == (4, WIDTH)
        assert x.grad is not None
    here, there = 4 * WIDTH * 4, 4 * WIDTH * (6 if received else 4)
    assert [(str(c.kind), c.input_bytes, str(c.phase)) for c in t.recording.collectives] == [
        ("all_to_all", here, "forward"),
        ("all_to_all", there, "forward"),
        ("all_to_all", here, "backward"),
        ("all_to_all", there, "backward"),
    ]


def test_expert_parallel_by_exchanged_counts(world: World) -> None:
    """Ranks first exchange how many tokens to expect."""
    counts = torch.tensor([2, 0, 1, 1])
    expected = torch.empty_like(counts)
    with trace() as t:
        dist.all_to_all_single(expected, counts)
    assert [c.dtype for c in t.recording.collectives] == ["int64"]
    assert expected.shape == (4,)


class _RingShift(torch.autograd.Function):
    """Sends a tensor to the next rank; its gradient is sent to the previous rank."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _shift(tensor, group, step=1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _shift(gradient.contiguous(), ctx.group, step=-1), None


def _shift(tensor: torch.Tensor, group: dist.ProcessGroup, *, step: int) -> torch.Tensor:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    received = torch.empty_like(tensor)
    work = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + step) % size),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - step) % size),
        ]
    )
    for handle in work:
        handle.wait()
    return received


class RingAttention(nn.Module):
    """Context parallel: keys and values go round the ring while queries stay."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, block = self.qkv(x).split([WIDTH, 2 * WIDTH], dim=-1)
        block = block.contiguous()
        total, weight = torch.zeros_like(query), torch.zeros_like(query[..., :1])
        for step in range(dist.get_world_size(self.group)):
            key, value = block.chunk(2, dim=-1)
            scores = (query @ key.transpose(-1, -2)).exp()
            total, weight = total + scores @ value, weight + scores.sum(-1, keepdim=True)
            if step < dist.get_world_size(self.group) - 1:
                block = _RingShift.apply(block, self.group)
        return total / weight


class GatheringAttention(nn.Module):
    """Context parallel: each rank gathers all keys and values."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, block = self.qkv(x).split([WIDTH, 2 * WIDTH], dim=-1)
        full = funcol.all_gather_tensor_autograd(block.contiguous(), 0, self.group)
        key, value = full.chunk(2, dim=-1)
        return nn.functional.scaled_dot_product_attention(query, key, value)


def attend(attention: type[nn.Module], *, rank: int, fake: bool) -> Recording:
    with simulate(mesh={"cp": 4}, rank=rank) as world:
        with torch.device("meta" if fake else "cpu"):
            model = attention(world.mesh.get_group())
        if fake:
            world.materialize(model)
        with trace(model) as t:
            output = model(torch.ones(4, WIDTH))
            output.sum().backward()
        assert output.shape == (4, WIDTH)
        assert next(model.parameters()).grad is not None
    return t.recording


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("rank", [0, 3])
def test_context_parallel_by_a_ring(rank: int, fake: bool) -> None:
    recording = attend(RingAttention, rank=rank, fake=fake)
    ahead, behind = (rank + 1) % 4, (rank - 1) % 4
    forward = [("send", ahead, "forward"), ("recv", behind, "forward")] * 3
    backward = [("send", behind, "backward"), ("recv", ahead, "backward")] * 3
    assert [(str(c.kind), c.peer, str(c.phase)) for c in recording.collectives] == (
        forward + backward
    )
    assert {max(c.input_bytes, c.output_bytes) for c in recording.collectives} == {
        4 * 4 * 2 * WIDTH
    }


@pytest.mark.parametrize("fake", [False, True])
def test_context_parallel_by_gathering(fake: bool) -> None:
    recording = attend(GatheringAttention, rank=2, fake=fake)
    block = 4 * 4 * 2 * WIDTH
    seen = [(str(c.kind), c.axis, c.input_bytes, str(c.phase)) for c in recording.collectives]
    assert seen == [
        ("all_gather", "cp", block, "forward"),
        ("reduce_scatter", "cp", 4 * block, "backward"),
    ]
