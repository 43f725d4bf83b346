"""Graphs that stay one call, `invoke_subgraph`, when what runs them is traced in its turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardscope._torch.aot_backends import Compiled, as_boxed
from shardscope._torch.private import find_name

__all__ = ["call_as_subgraph"]

invoke_subgraph_infer = find_name(
    "torch._higher_order_ops.invoke_subgraph.invoke_subgraph_infer",
    "keep a compiled graph a single call when it is traced",
)


def call_as_subgraph(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    """Run `gm` through the higher-order op."""

    def invoke(*operands: Any) -> Any:
        return invoke_subgraph_infer(gm, *operands)

    # Dynamo may meet this function in a graph of its own; it must not look inside.
    return as_boxed(torch.compiler.disable(torch.compiler.allow_in_graph(invoke)))
