"""A page of a real model: pieces lie where torch puts them, and a trace has its page."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from page_reader import read_page
from shardscope import audit, simulate, trace, visualize_sharding
from shardscope.report.page.build import build_page
from shardscope.report.page.views.drawings import draw_layout


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


@pytest.mark.parametrize("width", [8, 9], ids=["even", "uneven"])
@pytest.mark.parametrize("rank", [0, 5])
def test_pieces_lie_where_torch_puts_them(width: int, rank: int) -> None:
    with simulate({"dp": 2, "tp": 3}, rank=rank) as world:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model = parallelize_module(Net(width), world.mesh["tp"], plan)
        fully_shard(model, mesh=world.mesh["dp"])
        sharding = build_page(audit(model)).sharding
        layouts = {name: visualize_sharding(one) for name, one in model.named_parameters()}
    assert sharding is not None
    assert set(layouts) == set(sharding.parameters.name)
    for name, drawing in zip(sharding.parameters.name, sharding.parameters.drawing, strict=True):
        ours, torchs = sharding.drawings[drawing], draw_layout(layouts[name])
        found = [
            sorted((one.top, one.left, one.width, one.height, one.ranks) for one in drawn.pieces)
            for drawn in (ours, torchs)
        ]
        assert found[0]
        assert found[0] == found[1]


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
