"""One rank's program as an ExportedProgram, with its shards of the state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ArgumentSpec, ExportGraphSignature, OutputSpec

from shardscope._torch.export import expression_of, fake_mode_of, traced
from shardscope._torch.tree import pytree_flatten, pytree_unflatten
from shardscope.errors import ParallelError
from shardscope.parallel.ir.graph import ShardingGraph, SymbolicSizes, Value, explained
from shardscope.parallel.ir.shard_spec import MeshCoordinate, ShardSpec, local_shard
from shardscope.parallel.passes.lower import RankProgram

_StateT = TypeVar("_StateT")

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and keyword arguments of a call."""


def build_exported(
    source: ExportedProgram, graph: ShardingGraph, rank: RankProgram
) -> ExportedProgram:
    """The rank's program: inputs and outputs as the source's, with local state and sizes."""
    annotate(graph, rank)
    state = _without_gradients(local_state(source.state_dict, graph, rank.coordinate))
    constants = local_state(source.constants, graph, rank.coordinate)
    example = source.example_inputs
    return ExportedProgram(
        root=rank.as_module(),
        graph=rank.graph,
        graph_signature=_output_signature(source.graph_signature, rank.graph),
        state_dict=state,
        range_constraints=_ranges(source, graph.sizes),
        module_call_graph=source.module_call_graph,
        example_inputs=None if example is None else local_inputs(example, graph, rank.coordinate),
        constants=constants,
        verifiers=source.verifiers,
    )


def _without_gradients(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state, requiring no gradients: autograd through functional collectives would be wrong."""
    frozen: dict[int, Tensor] = {}
    for tensor in state.values():
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            frozen[id(tensor)] = nn.Parameter(tensor.detach(), requires_grad=False)
        else:
            frozen[id(tensor)] = tensor
    return {name: frozen[id(tensor)] for name, tensor in state.items()}


def annotate(graph: ShardingGraph, rank: RankProgram) -> None:
    """Run the program on fake tensors, store each node's as `meta["val"]`, and check its shape."""
    examples = [value.example for value, _ in graph.inputs if value.is_tensor]
    mode = fake_mode_of(examples)
    value_of_node = {node: value for value, node in rank.nodes.items() if isinstance(node, fx.Node)}
    values: dict[fx.Node, Any] = {}
    with traced(mode, has_open_sizes=bool(graph.sizes.known)):
        for node in rank.graph.nodes:
            if node.op == "placeholder":
                values[node] = local_example(value_of_node[node], rank.coordinate, graph.sizes)
            elif node.op == "get_attr":
                values[node] = rank.attributes[str(node.target)]
            elif node.op == "call_function":
                values[node] = _run_node(node, values)
            else:
                continue
            node.meta["val"] = values[node]
            if node in value_of_node:
                _check_shape(node, value_of_node[node], rank.coordinate)


def local_example(value: Value, coordinate: MeshCoordinate, sizes: SymbolicSizes) -> object:
    """A fake tensor of the shape of the rank's shard."""
    if not value.is_tensor:
        return value.example
    local = value.spec.local_shape(coordinate)
    if local == tuple(expression_of(size) for size in value.example_tensor.shape):
        return value.example
    shape = tuple(sizes.as_example(size) for size in local)
    return torch.empty(shape, dtype=value.dtype, device=value.example_tensor.device)


def _run_node(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    args = fx.node.map_arg(node.args, values.__getitem__)
    kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
    with explained(f"{node.target} ({node.name}) fails on the shards of one rank"):
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _check_shape(node: fx.Node, value: Value, coordinate: MeshCoordinate) -> None:
    example = node.meta["val"]
    if not value.is_tensor or not isinstance(example, Tensor):
        return
    expected = value.spec.local_shape(coordinate)
    if all(isinstance(size, int) for size in expected) and tuple(example.shape) != expected:
        raise ParallelError(
            f"{node.target} ({value.name}) computes {tuple(example.shape)} on one rank where "
            f"{expected} was expected. This is a bug in shardscope; please report the program."
        )


def _ranges(source: ExportedProgram, sizes: SymbolicSizes) -> dict[sympy.Symbol, object]:
    """The ranges of dynamic sizes; of a sharded size, the range of its shards."""
    ranges = {
        symbol: value_range
        for symbol, value_range in source.range_constraints.items()
        if symbol not in sizes.rewrites
    }
    return ranges | sizes.ranges


def local_state(
    state: Mapping[str, _StateT],
    graph: ShardingGraph,
    coordinate: MeshCoordinate,
    *,
    trained: Collection[str] = (),
) -> dict[str, _StateT]:
    """The rank's shards of parameters, buffers or constants; tied tensors stay tied.

    Tensors that the program writes to, or that are `trained`, are copied; those that it only
    reads are the source's own where they are replicated.
    """
    specs = {role.name: value.spec for value, role in graph.inputs if value.is_tensor}
    shards: dict[int, Any] = {}
    spec_by_id = {id(tensor): specs[name] for name, tensor in state.items() if name in specs}
    written_names = [*(role.name for _, role in graph.outputs), *trained]
    written = {id(state[name]) for name in written_names if name in state}
    for tensor in state.values():
        if id(tensor) not in shards:
            shard = _shard_of(tensor, spec_by_id.get(id(tensor)), coordinate)
            is_shared = shard is tensor and id(tensor) in written
            is_copied = is_shared and isinstance(shard, Tensor)
            shards[id(tensor)] = _copy(shard) if is_copied else shard
    return {name: shards[id(tensor)] for name, tensor in state.items()}


def _shard_of(tensor: Any, spec: ShardSpec | None, coordinate: MeshCoordinate) -> Any:
    if spec is None or spec.is_replicated or not isinstance(tensor, Tensor):
        return tensor
    with torch.no_grad():
        shard = local_shard(tensor, spec=spec, coordinate=coordinate)
    return _as_parameter(shard, tensor)


def _copy(tensor: Tensor) -> Tensor:
    return _as_parameter(tensor.detach().clone(), tensor)


def _as_parameter(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor, as a parameter where `like` is one."""
    is_parameter = isinstance(like, nn.Parameter)
    return nn.Parameter(tensor, requires_grad=like.requires_grad) if is_parameter else tensor


def local_inputs(
    example: CallArguments, graph: ShardingGraph, coordinate: MeshCoordinate
) -> CallArguments:
    """The rank's shards of the program's inputs."""
    leaves, tree = pytree_flatten(example)
    values = [value for value, role in graph.inputs if role.kind == "input"]
    shards = [
        local_shard(leaf, spec=value.spec, coordinate=coordinate)
        if isinstance(leaf, Tensor)
        else leaf
        for leaf, value in zip(leaves, values, strict=True)
    ]
    local: CallArguments = pytree_unflatten(shards, tree)
    return local


def _output_signature(signature: ExportGraphSignature, graph: fx.Graph) -> ExportGraphSignature:
    """The source's signature with the names of this graph's outputs."""
    (output,) = [node for node in graph.nodes if node.op == "output"]
    specs = [
        OutputSpec(kind=spec.kind, arg=_argument(item, spec.arg), target=spec.target)
        for item, spec in zip(output.args[0], signature.output_specs, strict=True)
    ]
    return ExportGraphSignature(input_specs=list(signature.input_specs), output_specs=specs)


def _argument(item: object, before: ArgumentSpec) -> ArgumentSpec:
    if not isinstance(item, fx.Node):
        return before
    return replace(before, name=item.name) if hasattr(before, "name") else before
