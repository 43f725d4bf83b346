"""Graphs in TorchScript: their source is first rewritten to what its compiler supports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from shardscope._torch.aot import Compiled, as_boxed, compile_ahead
from shardscope._torch.checking_modes import compile_script
from shardscope._torch.dispatch import is_overload, op_packet
from shardscope.compile.backends.graph_backends import copy_graph
from shardscope.compile.backends.options import read_options

Options = Mapping[str, Any] | None


def torchscript(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options = None,
    mode: str | None = None,
) -> Compiled:
    """Run the captured graph in TorchScript.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.
        options: Options of this backend; unknown options raise BackendError.
        mode: `mode` of torch.compile, which is ignored.

    Examples:
        >>> torch.compile(model, backend="shardscope_torchscript")(x)
    """
    read_options("torchscript", options, mode, {})
    return script_graph(gm, example_inputs)


def aot_ts(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options = None,
    mode: str | None = None,
) -> Compiled:
    """Run the forward and backward graphs of AOT autograd in TorchScript.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.
        options: Options of this backend; unknown options raise BackendError.
        mode: `mode` of torch.compile, which is ignored.

    Examples:
        >>> torch.compile(model, backend="shardscope_aot_ts")(x)
    """
    read_options("aot_ts", options, mode, {})
    return compile_ahead(
        gm, example_inputs, forward=lambda graph, inputs: as_boxed(script_graph(graph, inputs))
    )


def script_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    """`gm` compiled by TorchScript."""
    copy = copy_graph(gm)
    _declare_numbers(copy.graph, example_inputs)
    for node in copy.graph.nodes:
        _rewrite_args(node)
    copy.recompile()
    return compile_script(copy)


def _declare_numbers(graph: fx.Graph, example_inputs: Sequence[Any]) -> None:
    """Annotate inputs that are not tensors: by default TorchScript assumes tensors."""
    numbers = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, example in zip(placeholders, example_inputs, strict=False):
        kind = numbers.get(type(example), type(example))
        node.type = kind if kind in (int, float, bool) else None


def _rewrite_args(node: fx.Node) -> None:
    if node.op == "output":
        # Results of backward contain None: allowed in a tuple, not in a list of tensors.
        node.args = tuple(
            tuple(argument) if isinstance(argument, list) else argument for argument in node.args
        )
    if is_overload(node.target):
        packet = op_packet(node.target)
        node.target = torch.ops.aten.size if packet is torch.ops.aten.sym_size else packet
    node.kwargs = {
        name: str(value) if isinstance(value, torch.device) else value
        for name, value in node.kwargs.items()
    }
