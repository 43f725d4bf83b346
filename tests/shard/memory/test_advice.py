"""Whether a step fits, and advice that names figures."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from shardscope import Memory, memory, simulate
from shardscope._torch.cuda.caching_allocator import CONTEXT_BYTES
from shardscope.record import Finding, Severity
from shardscope.shard.memory.advice import ADVICE, OUT_OF_MEMORY

DIM = 1024
WEIGHT = DIM * DIM * 4
ROOM = CONTEXT_BYTES + (80 << 20)  # what CUDA and cuBLAS take, and a little


def stack(number: int = 8) -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()) for _ in range(number))


def run(layers: nn.ModuleList, num_rows: int, *, is_checkpointed: bool = False) -> None:
    x = torch.randn(num_rows, DIM)
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False) if is_checkpointed else layer(x)
    x.sum().backward()


def find(told: Memory, subject: str) -> list[Finding]:
    findings = told.recording.findings
    return [
        finding for finding in findings if finding.rule == ADVICE and finding.subject == subject
    ]


def test_without_a_device_there_is_nothing_to_say() -> None:
    model = stack(1)
    optimizer = torch.optim.SGD(model.parameters())
    assert memory(model, lambda: run(model, 8), optimizer).recording.findings == ()


def test_a_step_that_fits_well_is_no_finding() -> None:
    model = stack(1)
    optimizer = torch.optim.SGD(model.parameters())
    told = memory(model, lambda: run(model, 8), optimizer, device_bytes=80 << 30)
    assert told.recording.findings == ()
    assert told.profile.needed_bytes == told.profile.peak_bytes + CONTEXT_BYTES


def test_a_step_that_does_not_fit_is_an_error_with_figures() -> None:
    model = stack(2)
    told = memory(model, lambda: run(model, 8), device_bytes=CONTEXT_BYTES)
    first = told.recording.findings[0]
    assert (first.rule, first.severity, first.rank) == (OUT_OF_MEMORY, Severity.ERROR, 0)
    assert "more than the 621 MiB available" in first.fact
    assert "the peak is in backward" in first.fact


def test_what_only_just_fits_gets_advice_and_no_error() -> None:
    model = stack()
    needed = memory(model, lambda: run(model, 4096)).profile.needed_bytes
    told = memory(model, lambda: run(model, 4096), device_bytes=needed)
    severities = {finding.severity for finding in told.recording.findings}
    assert severities == {Severity.INFO}


def test_many_activations_get_the_advice_to_checkpoint_unless_they_do() -> None:
    model = stack()
    told = memory(model, lambda: run(model, 4096), device_bytes=ROOM)
    (advice,) = find(told, "0 … 7")
    assert "activations of 8 layers" in advice.fact
    assert "use_reentrant=False" in advice.remedy
    again = memory(
        model, lambda: run(model, 4096, is_checkpointed=True), device_bytes=CONTEXT_BYTES
    )
    assert find(again, "0 … 7") == []


def test_replicated_parameters_get_the_advice_to_shard_them() -> None:
    def tell(is_sharded: bool) -> Memory:
        with simulate({"dp": 8}) as world:
            with torch.device("meta"):
                model = stack()
            for layer in model if is_sharded else ():
                fully_shard(layer, mesh=world.mesh)
            world.materialize(model)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            return memory(model, lambda: run(model, 8), optimizer, device_bytes=ROOM)

    whole, sharded = tell(False), tell(True)
    (advice,) = find(whole, "mesh axis dp")
    assert "all 8 ranks along dp replicate take" in advice.fact
    assert 'fully_shard(layer, mesh=mesh["dp"])' in advice.remedy
    assert find(sharded, "mesh axis dp") == []
    assert sharded.profile.peak_bytes < whole.profile.peak_bytes


def test_a_peak_in_the_optimizer_gets_the_advice_to_fuse_it() -> None:
    model = stack()
    facts = []
    for fused in (False, True):
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        told = memory(model, lambda: run(model, 8), optimizer, device_bytes=ROOM)
        facts.append([item.remedy for item in find(told, "optimizer")])
    assert any("fused=True" in remedy for remedy in facts[0])
    assert not any("fused=True" in remedy for remedy in facts[1])


def test_large_state_gets_the_advice_to_use_an_optimizer_with_less() -> None:
    model = stack()
    adam = torch.optim.AdamW(model.parameters(), fused=True)
    told = memory(model, lambda: run(model, 8), adam, device_bytes=ROOM)
    assert any("8 bytes for each parameter" in item.fact for item in find(told, "optimizer"))
    plain = torch.optim.SGD(model.parameters())
    told = memory(model, lambda: run(model, 8), plain, device_bytes=ROOM)
    assert find(told, "optimizer") == []


@pytest.mark.parametrize("num_words", [16, 50_000])
def test_a_large_loss_gets_the_advice_to_compute_it_in_chunks(num_words: int) -> None:
    model = nn.Linear(64, num_words)

    def step() -> None:
        logits = model(torch.randn(4096, 64)).float()
        targets = torch.randint(0, num_words, (4096,))
        nn.functional.cross_entropy(logits, targets).backward()

    told = memory(model, step, device_bytes=ROOM)
    assert len([item for item in find(told, "loss") if "GiB" in item.fact]) == (num_words > 16)


def test_gradients_of_the_previous_step_get_the_advice_to_clear_them() -> None:
    model = stack()
    told = memory(model, lambda: run(model, 2048), device_bytes=ROOM)
    assert len(find(told, "gradients")) == 1
    cleared = memory(
        model, lambda: run(model, 2048), torch.optim.SGD(model.parameters()), device_bytes=ROOM
    )
    assert find(cleared, "gradients") == []


def test_advice_that_helps_most_comes_first_and_says_if_it_is_enough() -> None:
    model = stack()
    needed = memory(model, lambda: run(model, 4096)).profile.needed_bytes
    told = memory(model, lambda: run(model, 4096), device_bytes=needed - (64 << 20))
    error, *advice = told.recording.findings
    assert advice[0].subject == "0 … 7"
    assert error.remedy.startswith("The first piece of advice below could be enough")


def test_where_no_advice_is_enough_the_finding_says_so() -> None:
    model = stack()
    told = memory(model, lambda: run(model, 4096), device_bytes=1 << 20)
    assert "which is not enough: use smaller batches" in told.recording.findings[0].remedy
    bare = nn.Linear(4, 4)
    told = memory(bare, lambda: bare(torch.randn(1, 4)), device_bytes=1 << 20)
    assert told.recording.findings[0].remedy.startswith("Use smaller batches")
