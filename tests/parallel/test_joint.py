"""The joint graph keeps the dynamic sizes of the exported program."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from shardscope import parallelize
from shardscope.errors import ParallelError
from shardscope.parallel.passes import backward as joint


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).square().mean()


def test_dynamic_sizes_stay_dynamic_in_the_joint_graph() -> None:
    open_sizes = ({0: Dim("batch", max=64), 1: Dim("length", max=64)},)
    program = export(Model(), (torch.randn(5, 7, 8),), dynamic_shapes=open_sizes)
    plan = {"up": "colwise", "down": "rowwise"}
    cut = parallelize(program, mesh={"tp": 2}, plan=plan, training=True)
    shapes = [
        node.args[1]
        for node in cut.joint(0).graph_module.graph.find_nodes(
            op="call_function", target=torch.ops.aten.reshape.default
        )
    ]
    assert shapes
    assert not {5, 7, 5 * 7}.intersection(size for shape in shapes for size in shape)


def test_a_size_that_differentiating_specialized_is_an_error() -> None:
    graph = SimpleNamespace(sizes=SimpleNamespace(known={"s0": 3}))
    with pytest.raises(ParallelError, match=r"\(3 is what they were exported with\)"):
        joint._check_open(graph)
