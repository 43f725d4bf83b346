"""Forward and backward of a function as graphs, taken apart as Inductor takes them apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]

from shardscope._torch.decompositions import inductor_table
from shardscope._torch.private import find_name

__all__ = ["trace_graphs"]

aot_function = find_name(
    "torch._functorch.aot_autograd.aot_function", "reproduce the graphs of torch's op coverage tool"
)


def trace_graphs(function: Callable[..., Any], *args: Any) -> list[torch.fx.GraphModule]:
    """Run `function` and the backward of all it returns; the graphs of both, as they are made."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(gm)
        return make_boxed_func(gm)

    compiled = aot_function(function, fw_compiler=keep, decompositions=dict(inductor_table()))
    outputs = [one for one in compiled(*args) if one.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
    return graphs
