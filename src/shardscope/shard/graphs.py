"""A model's forward and backward as two graphs, for those who want graphs and not counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from shardscope._torch.aot import trace_graphs
from shardscope._torch.dispatch import is_overload
from shardscope._torch.fakes import without_data
from shardscope._torch.model_state import exchange_tensors, kept_model
from shardscope._torch.random_state import preserved_random_state
from shardscope.comm.names import NO_MODULE
from shardscope.shard.capture import Capture, Use
from shardscope.shard.outputs import tensors_in
from shardscope.shard.signature import freeze_call
from shardscope.shard.stand_ins import StandIns, empty_like, map_tensors

__all__ = ["calls_in", "inductor_graphs"]


def inductor_graphs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[fx.GraphModule]:
    """The graphs of `model` after Inductor's decompositions: forward, and backward if it has one.

    Parameters and buffers are inputs, tied ones once. The model is left as it was.
    """

    def flat(tensors: dict[str, torch.Tensor], args: Any, kwargs: Any) -> list[torch.Tensor]:
        return list(tensors_in(torch.func.functional_call(model, tensors, args, kwargs)))

    with without_data(), preserved_random_state(), kept_model(model):
        stand_ins = StandIns(lambda tensor: empty_like(tensor, torch.device("cpu")))
        exchange_tensors(model, stand_ins.of)
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        given = map_tensors((args, kwargs), stand_ins.of)
        return trace_graphs(flat, tensors, *given)


def calls_in(graph: fx.GraphModule) -> Capture:
    """Every call of an op in the graph."""
    captured: Capture = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and is_overload(node.target):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), _read)
            call = freeze_call(node.target, args, kwargs)
            captured.setdefault(call, Use()).forward[NO_MODULE, None] += 1
    return captured


def _read(node: fx.Node) -> Any:
    return node.meta.get("val")
