"""A page of a real model: pieces are placed as by torch, and a trace has its page."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from page_reader import read_page
from shardscope import audit, simulate, trace, visualize_sharding
from shardscope.report.html.html import build_page
from shardscope.report.html.sharding_rows import draw_layout


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


@pytest.mark.parametrize("width", [8, 9], ids=["even", "uneven"])
@pytest.mark.parametrize("rank", [0, 5])
def test_shards_are_placed_as_by_torch(width: int, rank: int) -> None:
    with simulate({"dp": 2, "tp": 3}, rank=rank) as world:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model = parallelize_module(Net(width), world.mesh["tp"], plan)
        fully_shard(model, mesh=world.mesh["dp"])
        sharding = build_page(audit(model)).sharding
        layouts = {
            name: visualize_sharding(parameter) for name, parameter in model.named_parameters()
        }
    assert sharding is not None
    assert set(layouts) == set(sharding.parameters.name)
    for name, drawing in zip(sharding.parameters.name, sharding.parameters.drawing, strict=True):
        ours, torchs = sharding.drawings[drawing], draw_layout(layouts[name])
        pieces = [
            sorted(
                (shard.top, shard.left, shard.width, shard.height, shard.ranks)
                for shard in drawn.shards
            )
            for drawn in (ours, torchs)
        ]
        assert pieces[0]
        assert pieces[0] == pieces[1]


def test_a_trace_has_a_page() -> None:
    with simulate({"dp": 2, "tp": 2}) as world:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model = parallelize_module(Net(8), world.mesh["tp"], plan)
        with trace(model) as t:
            model(torch.ones(4, 8)).sum().backward()
    page = read_page(t.recording.html())
    assert page.run.title == "Net on dp=2 × tp=2"
    assert page.communication is not None
    calls = page.communication.calls
    assert len(calls.rank) == len(t.recording.collectives) > 0
    assert {page.modules.path[at] for at in calls.owner} == {
        call.owner for call in t.recording.collectives
    }
    lines = {page.sources.text[at] for at in calls.source if at >= 0}
    assert lines
