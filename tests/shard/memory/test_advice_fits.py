"""Advice that does not fit the model is not given."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shardscope import Memory, memory, simulate
from shardscope._torch.cuda.caching_allocator import CONTEXT_BYTES
from shardscope.record import Finding
from shardscope.shard.memory.advice import ADVICE

DIM = 1024
WEIGHT = DIM * DIM * 4
ROOM = CONTEXT_BYTES + (80 << 20)


def linears(number: int = 8) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(number)))


def advice(told: Memory, subject: str | None = None) -> list[Finding]:
    findings = (finding for finding in told.recording.findings if finding.rule == ADVICE)
    return [finding for finding in findings if subject in (None, finding.subject)]


def test_layers_that_keep_but_their_outputs_gain_nothing_from_checkpointing() -> None:
    model = linears(16)
    told = memory(model, lambda: model(torch.randn(4096, DIM)).sum().backward(), device_bytes=ROOM)
    assert not any("checkpoint(layer" in item.remedy for item in advice(told))


def test_checkpointing_is_not_advised_twice_however_long_the_step() -> None:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.GELU()) for _ in range(150))
    )

    def step() -> None:
        x = torch.randn(4096, 64)
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False)
        x.sum().backward()

    told = memory(model, step, device_bytes=ROOM)
    assert not any("checkpoint(layer" in item.remedy for item in advice(told))


def tell_sharded(axes: dict[str, int], over: str | None) -> Memory:
    with simulate(axes) as world:
        with torch.device("meta"):
            model = linears()
        for layer in model if over else ():
            fully_shard(layer, mesh=world.mesh[over])
        world.materialize(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        return memory(
            model,
            lambda: model(torch.randn(8, DIM)).sum().backward(),
            optimizer,
            device_bytes=ROOM,
        )


@pytest.mark.parametrize(("axes", "over"), [({"pp": 4, "dp": 2}, None), ({"dp": 4, "tp": 2}, "dp")])
def test_no_other_axis_than_the_data_parallel_one_is_advised(
    axes: dict[str, int], over: str | None
) -> None:
    subjects = {item.subject for item in advice(tell_sharded(axes, over))}
    assert not subjects & {"mesh axis pp", "mesh axis tp"}
    assert ("mesh axis dp" in subjects) == (over is None)


def test_ddp_is_advised_to_share_its_buckets_and_not_to_gather_less() -> None:
    counts = []
    for has_views in (False, True):
        with simulate({"dp": 2}):
            model = DistributedDataParallel(linears(), gradient_as_bucket_view=has_views)
            told = memory(
                model,
                lambda m=model: m(torch.randn(8, DIM)).sum().backward(),
                device_bytes=ROOM,
            )
        assert advice(told, "FSDP") == []
        counts.append(sum("gradient_as_bucket_view=True" in item.remedy for item in advice(told)))
    assert counts == [1, 0]


def test_image_outputs_are_not_mistaken_for_a_loss() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    told = memory(
        model, lambda: model(torch.randn(64, 3, 512, 512)).sum().backward(), device_bytes=ROOM
    )
    assert advice(told, "loss") == []


@pytest.mark.parametrize("is_list", [True, False])
def test_optimizers_that_take_one_parameter_at_a_time_are_left_alone(is_list: bool) -> None:
    model = linears()
    optimizer = torch.optim.Rprop(model.parameters(), foreach=None if is_list else False)
    told = memory(
        model,
        lambda: model(torch.randn(8, DIM)).sum().backward(),
        optimizer,
        device_bytes=ROOM,
    )
    assert any("foreach=False" in item.remedy for item in advice(told)) == is_list
    assert not any("fused=True" in item.remedy for item in advice(told))
