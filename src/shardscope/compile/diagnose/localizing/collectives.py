"""Collectives in a graph replaced by what they do where all ranks hold the same.

A sum over n ranks is n times the tensor, gathering puts n copies of it together, and so on. Shapes
and dtypes are those of the real ones; numbers are those of a world whose ranks are alike.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from shardscope._torch.dispatch import op_schema
from shardscope._torch.functional_collectives import size_and_rank, talking_overload
from shardscope.compile.diagnose.fragment import Fragment

__all__ = ["has_collectives", "make_local"]

_KEPT = ("stack_trace", "nn_module_stack", "source_fn_stack")
_SAME = ("wait_tensor", "wait_tensors", "_wrap_tensor_autograd", "isend", "irecv", "batch_p2p_ops")


def has_collectives(fragment: Fragment) -> bool:
    """Whether its graph talks to other ranks."""
    return any(_find_op(node) is not None for node in fragment.graph.graph.nodes)


def make_local(fragment: Fragment) -> Fragment:
    """The fragment for one process without a process group; as it is if it needs none.

    Call it where the process groups are that the graph names: their sizes are theirs to tell. Of a
    group that nobody knows, this process is taken to be the only rank.
    """
    if not has_collectives(fragment) and not any(map(_is_group, fragment.inputs)):
        return fragment
    nodes = fx.Graph()
    nodes.output(nodes.graph_copy(fragment.graph.graph, {}))
    graph = fx.GraphModule(fragment.graph, nodes)
    values = dict(zip(_placeholders(nodes), fragment.inputs, strict=True))
    for node in list(nodes.nodes):
        op = _find_op(node)
        if op is not None:
            _replace(node, op, values)
    _drop_groups(nodes, values)
    nodes.lint()
    graph.recompile()
    kept = tuple(values[node] for node in _placeholders(nodes))
    return dataclasses.replace(fragment, graph=graph, inputs=kept)


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _find_op(node: fx.Node) -> Any | None:
    return talking_overload(node.target) if node.op == "call_function" else None


def _replace(node: fx.Node, op: Any, values: Mapping[fx.Node, Any]) -> None:
    """Put plain ops in the place of a collective."""
    given = _bind(node, op)
    name = op_schema(op).name.rpartition("::")[2].rstrip("_")
    tensors = next(iter(given.values())) if name != "batch_p2p_ops" else given["tensors"]
    with node.graph.inserting_before(node):
        maker = _Maker(node, _find_group(given, values))
        results = [maker.make(name, one, given) for one in _as_list(tensors)]
        target = _written(op, given)
        if target is not None:
            pairs = zip(_as_list(target), results, strict=True)
            results = [node.graph.call_method("copy_", pair) for pair in pairs]
        if isinstance(tensors, tuple | list):
            _hand_out(node, results)
        else:
            node.replace_all_uses_with(results[0])
    node.graph.erase_node(node)


def _bind(node: fx.Node, op: Any) -> dict[str, Any]:
    """The arguments of a node by the names that the schema gives them."""
    names = [argument.name for argument in op_schema(op).arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _written(op: Any, given: Mapping[str, Any]) -> Any:
    """The arguments that the op writes its results into."""
    names = [one.name for one in op_schema(op).arguments if _is_written(one)]
    return given[names[0]] if names else None


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else [value]


def _hand_out(node: fx.Node, results: Sequence[fx.Node]) -> None:
    """Give those who take a result by its index that result."""
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
            node.graph.erase_node(user)
    if node.users:
        node.replace_all_uses_with(node.graph.call_function(list, (list(results),)))


def _find_group(given: Mapping[str, Any], values: Mapping[fx.Node, Any]) -> tuple[int, int]:
    """Size of the group that an op talks to, and this process's rank in it."""
    group = given.get("group_name")
    known = size_and_rank(values.get(group) if isinstance(group, fx.Node) else group)
    ranks = given.get("ranks")
    size = given.get("group_size") or (len(ranks) if ranks else None)
    if known is not None:
        return known
    return (size, 0) if isinstance(size, int) else (1, 0)


def _is_group(value: Any) -> bool:
    return isinstance(value, dist.ProcessGroup | DeviceMesh)


def _drop_groups(graph: fx.Graph, values: Mapping[fx.Node, Any]) -> None:
    """Take out what no one process can be given: groups and meshes, and what is made of them."""
    gone = {node: None for node, value in values.items() if _is_group(value)}
    for node in graph.nodes:
        takes = node.all_input_nodes
        if takes and node.op.startswith("call") and all(one in gone for one in takes):
            gone[node] = None
    last = graph.output_node()
    results = last.args[0]
    if isinstance(results, tuple | list):
        kept = (one for one in results if not isinstance(one, fx.Node) or one not in gone)
        last.args = (tuple(kept),)
    for node in reversed(gone):
        if not node.users:
            graph.erase_node(node)


@final
@dataclass(frozen=True)
class _Maker:
    """Makes the plain ops for one collective, which knows its line as it did."""

    node: fx.Node
    group: tuple[int, int]

    def make(self, name: str, tensor: fx.Node, given: Mapping[str, Any]) -> fx.Node:
        """The local effect of an op on one tensor."""
        size, rank = self.group
        name = name.removesuffix("_out").removesuffix("_coalesced").removesuffix("_into_tensor")
        if name in _SAME:
            return tensor
        if name == "all_gather":
            return self._repeat(tensor, size)
        if name == "shard_dim_alltoall":
            whole = self._repeat(tensor, size, dim=given["gather_dim"])
            return self._piece(whole, size, rank, dim=given["shard_dim"])
        if name == "all_to_all_single":
            return self._exchange(tensor, given)
        reduced = self._reduce(tensor, given.get("reduce_op", given.get("reduceOp", "")))
        if name.startswith("reduce_scatter"):
            return self._piece(reduced, size, rank, dim=0)
        return reduced

    def _reduce(self, tensor: fx.Node, how: str) -> fx.Node:
        size, _ = self.group
        if how.lower() == "sum":
            return self._call(torch.mul, tensor, size)
        if how.lower() == "product":
            return self._call(torch.pow, tensor, size)
        # Of equal ones the mean, the largest, the smallest and the first are the same.
        return self._call(torch.clone, tensor)

    def _repeat(self, tensor: fx.Node, size: int, *, dim: int = 0) -> fx.Node:
        return self._call(torch.cat, [tensor] * size, dim=dim)

    def _piece(self, tensor: fx.Node, size: int, rank: int, *, dim: int) -> fx.Node:
        pieces = self._call(torch.tensor_split, tensor, size, dim=dim)
        piece = self._call(operator.getitem, pieces, rank)
        return self._call(torch.clone, piece, memory_format=torch.contiguous_format)

    def _exchange(self, tensor: fx.Node, given: Mapping[str, Any]) -> fx.Node:
        """What every rank sends to this one, which is the same from each where sizes allow it."""
        size, rank = self.group
        sent, received = given.get("input_split_sizes"), given.get("output_split_sizes")
        if not sent or not received:
            piece = self._piece(tensor, size, rank, dim=0)
            return self._repeat(piece, size)
        if any(isinstance(one, fx.Node) for one in (*sent, *received)):
            return self._call(torch.clone, tensor)
        # Ranks that are alike would send as much as this one does; where they do not, fill up.
        piece = self._call(torch.narrow, tensor, 0, sum(sent[:rank]), sent[rank])
        if all(one == sent[rank] for one in received):
            return self._repeat(piece, len(received))
        rows = max(1, sum(sent))
        whole = self._repeat(tensor, -(-sum(received) // rows) or 1)
        part = self._call(torch.narrow, whole, 0, 0, sum(received))
        return self._call(torch.clone, part, memory_format=torch.contiguous_format)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        made = self.node.graph.call_function(function, args, kwargs)
        made.meta.update({key: self.node.meta[key] for key in _KEPT if key in self.node.meta})
        return made
