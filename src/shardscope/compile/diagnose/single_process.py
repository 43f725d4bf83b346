"""Graphs of a distributed program rewritten to run in one process: no DTensors, no collectives."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardscope._torch.aot import AotRun, CompilerInput, run_ahead, watched_aot
from shardscope._torch.collectives.functional import as_collective_overload, size_and_rank
from shardscope._torch.dispatch import op_schema
from shardscope._torch.inductor import without_caches
from shardscope.compile.diagnose.subgraph import Subgraph

_ORIGIN_META = ("stack_trace", "nn_module_stack", "source_fn_stack")
_IDENTITIES = (
    "wait_tensor",
    "wait_tensors",
    "_wrap_tensor_autograd",
    "isend",
    "irecv",
    "batch_p2p_ops",
)


def has_collectives(subgraph: Subgraph) -> bool:
    """Whether the graph has collectives or point-to-point ops."""
    return any(_find_op(node) is not None for node in subgraph.graph.graph.nodes)


def replace_collectives(subgraph: Subgraph) -> Subgraph:
    """Replace collectives by local ops, so that the subgraph runs without a process group.

    Returns the same subgraph if there is nothing to replace. Call it in the process that has the
    process groups, because it reads their sizes; a group that is not registered counts as a group
    of one rank.
    """
    if not has_collectives(subgraph) and not any(map(_is_group, subgraph.inputs)):
        return subgraph
    nodes = fx.Graph()
    nodes.output(nodes.graph_copy(subgraph.graph.graph, {}))
    graph = fx.GraphModule(subgraph.graph, nodes)
    values = dict(zip(_placeholders(nodes), subgraph.inputs, strict=True))
    for node in list(nodes.nodes):
        op = _find_op(node)
        if op is not None:
            _replace(node, op, values)
    _drop_groups(nodes, values)
    nodes.lint()
    graph.recompile()
    inputs = tuple(values[node] for node in _placeholders(nodes))
    return dataclasses.replace(subgraph, graph=graph, inputs=inputs)


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _find_op(node: fx.Node) -> Any | None:
    return as_collective_overload(node.target) if node.op == "call_function" else None


def _replace(node: fx.Node, op: Any, values: Mapping[fx.Node, Any]) -> None:
    """Replace a collective by local ops."""
    arguments = _bind(node, op)
    name = op_schema(op).name.rpartition("::")[2].rstrip("_")
    tensors = next(iter(arguments.values())) if name != "batch_p2p_ops" else arguments["tensors"]
    with node.graph.inserting_before(node):
        writer = _LocalOpWriter(node, _find_group(arguments, values))
        results = [writer.make(name, tensor, arguments) for tensor in _as_list(tensors)]
        target = _find_written(op, arguments)
        if target is not None:
            pairs = zip(_as_list(target), results, strict=True)
            results = [node.graph.call_method("copy_", pair) for pair in pairs]
        if isinstance(tensors, tuple | list):
            _replace_items(node, results)
        else:
            node.replace_all_uses_with(results[0])
    node.graph.erase_node(node)


def _bind(node: fx.Node, op: Any) -> dict[str, Any]:
    """The arguments of a node by their names in the op's schema."""
    names = [argument.name for argument in op_schema(op).arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _find_written(op: Any, arguments: Mapping[str, Any]) -> Any:
    """The arguments that the op writes its results to; None if it writes to none."""
    names = [argument.name for argument in op_schema(op).arguments if _is_written(argument)]
    return arguments[names[0]] if names else None


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else [value]


def _replace_items(node: fx.Node, results: Sequence[fx.Node]) -> None:
    """Replace `getitem` nodes on a list of results by the results."""
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
            node.graph.erase_node(user)
    if node.users:
        node.replace_all_uses_with(node.graph.call_function(list, (list(results),)))


def _find_group(arguments: Mapping[str, Any], values: Mapping[fx.Node, Any]) -> tuple[int, int]:
    """The size of the process group of an op, and this process's rank in it."""
    group = arguments.get("group_name")
    group_size_and_rank = size_and_rank(values.get(group) if isinstance(group, fx.Node) else group)
    ranks = arguments.get("ranks")
    size = arguments.get("group_size") or (len(ranks) if ranks else None)
    if group_size_and_rank is not None:
        return group_size_and_rank
    return (size, 0) if isinstance(size, int) else (1, 0)


def _is_group(value: Any) -> bool:
    return isinstance(value, dist.ProcessGroup | DeviceMesh)


def _drop_groups(graph: fx.Graph, values: Mapping[fx.Node, Any]) -> None:
    """Remove process groups and meshes, and the nodes that are computed from them alone."""
    dropped = {node: None for node, value in values.items() if _is_group(value)}
    for node in graph.nodes:
        sources = node.all_input_nodes
        if sources and node.op.startswith("call") and all(source in dropped for source in sources):
            dropped[node] = None
    last = graph.output_node()
    results = last.args[0]
    if isinstance(results, tuple | list):
        remaining = (
            result for result in results if not isinstance(result, fx.Node) or result not in dropped
        )
        last.args = (tuple(remaining),)
    for node in reversed(dropped):
        if not node.users:
            graph.erase_node(node)


@final
@dataclass(frozen=True)
class _LocalOpWriter:
    """Adds the local ops that replace one collective, with the collective's `stack_trace`."""

    node: fx.Node
    group: tuple[int, int]

    def make(self, name: str, tensor: fx.Node, arguments: Mapping[str, Any]) -> fx.Node:
        """The local effect of a collective on one tensor."""
        size, rank = self.group
        name = name.removesuffix("_out").removesuffix("_coalesced").removesuffix("_into_tensor")
        if name in _IDENTITIES:
            return tensor
        if name == "all_gather":
            return self._repeat(tensor, size)
        if name == "shard_dim_alltoall":
            gathered = self._repeat(tensor, size, dim=arguments["gather_dim"])
            return self._chunk(gathered, size, rank, dim=arguments["shard_dim"])
        if name == "all_to_all_single":
            return self._exchange(tensor, arguments)
        reduced = self._reduce(tensor, arguments.get("reduce_op", arguments.get("reduceOp", "")))
        if name.startswith("reduce_scatter"):
            return self._chunk(reduced, size, rank, dim=0)
        return reduced

    def _reduce(self, tensor: fx.Node, how: str) -> fx.Node:
        size, _ = self.group
        if how.lower() == "sum":
            return self._call(torch.mul, tensor, size)
        if how.lower() == "product":
            return self._call(torch.pow, tensor, size)
        # With equal values on all ranks, mean, max, min and broadcast return the value itself.
        return self._call(torch.clone, tensor)

    def _repeat(self, tensor: fx.Node, size: int, *, dim: int = 0) -> fx.Node:
        return self._call(torch.cat, [tensor] * size, dim=dim)

    def _chunk(self, tensor: fx.Node, size: int, rank: int, *, dim: int) -> fx.Node:
        chunks = self._call(torch.tensor_split, tensor, size, dim=dim)
        chunk = self._call(operator.getitem, chunks, rank)
        return self._call(torch.clone, chunk, memory_format=torch.contiguous_format)

    def _exchange(self, tensor: fx.Node, arguments: Mapping[str, Any]) -> fx.Node:
        """An all-to-all: every rank sends the same data to this rank, if the sizes allow it."""
        size, rank = self.group
        sent, received = arguments.get("input_split_sizes"), arguments.get("output_split_sizes")
        if not sent or not received:
            chunk = self._chunk(tensor, size, rank, dim=0)
            return self._repeat(chunk, size)
        if any(isinstance(split_size, fx.Node) for split_size in (*sent, *received)):
            return self._call(torch.clone, tensor)
        # If all ranks were equal, each would send as much as this one; otherwise pad with own data.
        chunk = self._call(torch.narrow, tensor, 0, sum(sent[:rank]), sent[rank])
        if all(split_size == sent[rank] for split_size in received):
            return self._repeat(chunk, len(received))
        rows = max(1, sum(sent))
        repeated = self._repeat(tensor, -(-sum(received) // rows) or 1)
        part = self._call(torch.narrow, repeated, 0, 0, sum(received))
        return self._call(torch.clone, part, memory_format=torch.contiguous_format)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        result = self.node.graph.call_function(function, args, kwargs)
        result.meta.update(
            {key: self.node.meta[key] for key in _ORIGIN_META if key in self.node.meta}
        )
        return result


_METHODS = ("full_tensor", "redistribute", "to_local")


def has_dtensors(subgraph: Subgraph) -> bool:
    """Whether the graph has DTensors or meshes as inputs, or creates DTensors."""
    return any(isinstance(value, DTensor | DeviceMesh) for value in subgraph.inputs) or any(
        _makes_dtensors(node) for node in subgraph.graph.graph.nodes
    )


def _makes_dtensors(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _METHODS
    module = getattr(node.target, "__module__", None) or ""
    return node.op == "call_function" and module.startswith("torch.distributed.tensor")


def unwrap_dtensors(subgraph: Subgraph) -> Subgraph:
    """The forward as ATen ops on this rank's local tensors, with collectives replaced by local ops.

    Call it in the world that the DTensors belong to. Nodes keep their `stack_trace`; inputs require
    gradients as before, and autograd differentiates the ATen ops.
    """
    run = AotRun(has_own_compilers=False, keeps_graphs=True)
    with watched_aot(run), without_caches(), torch.no_grad():
        run_ahead(subgraph.graph, [_detach(value) for value in subgraph.inputs])
    (compiler_input,) = run.handed
    return replace_collectives(
        replace(subgraph, graph=compiler_input.graph, inputs=_inputs(compiler_input, subgraph))
    )


def _detach(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _inputs(compiler_input: CompilerInput, subgraph: Subgraph) -> tuple[Any, ...]:
    """The inputs of the traced graph, with `requires_grad` as in the subgraph's inputs."""
    assert compiler_input.inputs is not None
    tensors = [value for value in compiler_input.inputs if isinstance(value, torch.Tensor)]
    requires_grad_flags = [
        value.requires_grad for value in subgraph.inputs if isinstance(value, torch.Tensor)
    ]
    # A DTensor has one local tensor here; otherwise the inputs cannot be matched.
    if len(tensors) == len(requires_grad_flags):
        for tensor, requires_grad in zip(tensors, requires_grad_flags, strict=True):
            tensor.requires_grad_(requires_grad)
    return compiler_input.inputs


_DESUGARED = (
    "Its DTensors were replaced by their shards on this rank, and collectives by what they return "
    "if all ranks hold the same values."
)
_LOCAL = "Collectives were replaced by what they return if all ranks hold the same values."


@final
@dataclass(frozen=True)
class SingleProcessSubgraph:
    """A subgraph that runs in one process, and notes on what was replaced."""

    subgraph: Subgraph
    notes: tuple[str, ...] = ()


def strip_distributed(subgraph: Subgraph) -> SingleProcessSubgraph:
    """Replace DTensors and collectives, so that one process can run the subgraph."""
    if has_dtensors(subgraph):
        return SingleProcessSubgraph(unwrap_dtensors(subgraph), (_DESUGARED,))
    if has_collectives(subgraph):
        return SingleProcessSubgraph(replace_collectives(subgraph), (_LOCAL,))
    return SingleProcessSubgraph(subgraph)
