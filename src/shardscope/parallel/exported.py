"""One rank's program as an ExportedProgram, with its share of the state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    OutputSpec,
)

from shardscope._torch.programs import (
    expression_of,
    fake_mode_of,
    flatten,
    traced,
    unflatten,
)
from shardscope.errors import ParallelError
from shardscope.parallel.blame import explained
from shardscope.parallel.flow import Flow, Value
from shardscope.parallel.layouts import Layout, Seat
from shardscope.parallel.partition import RankProgram
from shardscope.parallel.rules.dealing import piece_of
from shardscope.parallel.symbols import OpenSizes

__all__ = ["annotate", "build_exported", "local_example", "local_inputs", "local_state"]


def build_exported(source: ExportedProgram, flow: Flow, rank: RankProgram) -> ExportedProgram:
    """The rank's program: same inputs and outputs as the source, state and sizes its own."""
    annotate(flow, rank)
    state = _without_gradients(local_state(source.state_dict, flow, rank.seat))
    constants = local_state(source.constants, flow, rank.seat)
    example = source.example_inputs
    return ExportedProgram(
        root=rank.as_module(),
        graph=rank.graph,
        graph_signature=_sign(source.graph_signature, rank.graph),
        state_dict=state,
        range_constraints=_ranges(source, flow.sizes),
        module_call_graph=source.module_call_graph,
        example_inputs=None if example is None else local_inputs(example, flow, rank.seat),
        constants=constants,
        verifiers=source.verifiers,
    )


def _without_gradients(state: Mapping[str, Any]) -> dict[str, Any]:
    """Autograd through a collective is wrong, so a program that runs forward allows none."""
    own: dict[int, Any] = {}
    for one in state.values():
        is_trained = isinstance(one, nn.Parameter) and one.requires_grad
        own[id(one)] = nn.Parameter(one.detach(), requires_grad=False) if is_trained else one
    return {name: own[id(one)] for name, one in state.items()}


def annotate(flow: Flow, rank: RankProgram) -> None:
    """Give every node the value that export would have traced it with, and check its shape."""
    examples = [value.example for value, _ in flow.inputs if value.is_tensor]
    mode = fake_mode_of(examples)
    promised = {node: value for value, node in rank.nodes.items() if isinstance(node, fx.Node)}
    values: dict[fx.Node, Any] = {}
    with traced(mode, has_open_sizes=bool(flow.sizes.known)):
        for node in rank.graph.nodes:
            if node.op == "placeholder":
                values[node] = local_example(promised[node], rank.seat, flow.sizes)
            elif node.op == "get_attr":
                values[node] = rank.attributes[str(node.target)]
            elif node.op == "call_function":
                values[node] = _run(node, values)
            else:
                continue
            node.meta["val"] = values[node]
            if node in promised:
                _check(node, promised[node], rank.seat)


def local_example(value: Value, seat: Seat, sizes: OpenSizes) -> Any:
    """What export would have traced the rank's piece with."""
    if not value.is_tensor:
        return value.example
    local = value.layout.local_shape(seat)
    if local == tuple(expression_of(size) for size in value.example.shape):
        return value.example
    shape = tuple(sizes.example(size) for size in local)
    return torch.empty(shape, dtype=value.dtype, device=value.example.device)


def _run(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    args = fx.node.map_arg(node.args, values.__getitem__)
    kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
    with explained(f"{node.target} ({node.name}) fails on the shards of one rank"):
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _check(node: fx.Node, value: Value, seat: Seat) -> None:
    found = node.meta["val"]
    if not value.is_tensor or not isinstance(found, Tensor):
        return
    promised = value.layout.local_shape(seat)
    if all(isinstance(one, int) for one in promised) and tuple(found.shape) != promised:
        raise ParallelError(
            f"{node.target} ({value.name}) computes {tuple(found.shape)} on one rank where "
            f"{promised} was expected. This is a bug in shardscope; please report the program."
        )


def _ranges(source: ExportedProgram, sizes: OpenSizes) -> dict[Any, Any]:
    """Between what the open sizes may lie; where one is cut, that of its pieces."""
    ranges = {one: r for one, r in source.range_constraints.items() if one not in sizes.changes}
    return ranges | sizes.ranges


def local_state(
    state: Mapping[str, Any], flow: Flow, seat: Seat, *, trained: Collection[str] = ()
) -> dict[str, Any]:
    """The rank's share of parameters, buffers or constants; what is one tensor stays one.

    What the program writes to, and what is `trained`, is the rank's own; what it only reads it
    shares with the source.
    """
    layouts = {role.name: value.layout for value, role in flow.inputs if value.is_tensor}
    shares: dict[int, Any] = {}
    by_identity = {id(one): layouts[name] for name, one in state.items() if name in layouts}
    names = [*(role.name for _, role in flow.outputs), *trained]
    changed = {id(state[name]) for name in names if name in state}
    for one in state.values():
        if id(one) not in shares:
            share = _share(one, by_identity.get(id(one)), seat)
            shares[id(one)] = _copy(share) if share is one and id(one) in changed else share
    return {name: shares[id(one)] for name, one in state.items()}


def _share(tensor: Any, layout: Layout | None, seat: Seat) -> Any:
    if layout is None or layout.is_replicated or not isinstance(tensor, Tensor):
        return tensor
    with torch.no_grad():
        piece = piece_of(tensor, layout=layout, seat=seat)
    return _as_parameter(piece, tensor)


def _copy(tensor: Tensor) -> Tensor:
    return _as_parameter(tensor.detach().clone(), tensor)


def _as_parameter(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor, as a parameter where `like` is one."""
    is_one = isinstance(like, nn.Parameter)
    return nn.Parameter(tensor, requires_grad=like.requires_grad) if is_one else tensor


def local_inputs(example: tuple[Any, Any], flow: Flow, seat: Seat) -> tuple[Any, Any]:
    """The rank's pieces of the program's inputs."""
    leaves, tree = flatten(example)
    values = [value for value, role in flow.inputs if role.kind == "input"]
    pieces = [
        piece_of(one, layout=value.layout, seat=seat) if isinstance(one, Tensor) else one
        for one, value in zip(leaves, values, strict=True)
    ]
    local: tuple[Any, Any] = unflatten(pieces, tree)
    return local


def _sign(signature: ExportGraphSignature, graph: fx.Graph) -> ExportGraphSignature:
    """The source's signature with the names of this graph's outputs."""
    (output,) = [node for node in graph.nodes if node.op == "output"]
    specs = [
        OutputSpec(kind=spec.kind, arg=_argument(item, spec.arg), target=spec.target)
        for item, spec in zip(output.args[0], signature.output_specs, strict=True)
    ]
    return ExportGraphSignature(input_specs=list(signature.input_specs), output_specs=specs)


def _argument(item: Any, before: Any) -> Any:
    if not isinstance(item, fx.Node):
        return before
    return replace(before, name=item.name) if hasattr(before, "name") else before
