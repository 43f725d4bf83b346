"""Memory of each rank: its shards of the state, its inputs, and what its program allocates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from shardscope._torch.collectives.functional import WAIT
from shardscope._torch.export import expression_of
from shardscope._torch.tree import pytree_flatten
from shardscope.parallel.ir.graph import ShardingGraph, Value
from shardscope.parallel.ir.shard_spec import MeshCoordinate, ShardSpec
from shardscope.parallel.passes.cost_model import Hints, size_hint
from shardscope.plan.placements import product
from shardscope.record import RankMemory, compress_ranks


@final
@dataclass(frozen=True)
class Footprint:
    """Bytes of the storages that a program allocates; its inputs and state are not counted."""

    gradient_bytes: int  # of the results that are gradients
    intermediate_bytes: int  # of all other storages, at their peak
    peak_bytes: int  # of all storages, at their peak
    peak_node: fx.Node | None


def measure(graph: fx.Graph, hints: Hints, *, gradients: Iterable[fx.Node] = ()) -> Footprint:
    """The peak memory of a graph whose nodes have fake tensors in `meta["val"]`.

    `gradients` are nodes to count separately. Outputs live to the end, other
    tensors as long as a later node reads them or a view of them.
    """
    walk = _StorageTracker(hints)
    for position, node in enumerate(graph.nodes):
        walk.visit(position, node)
    for node in gradients:
        for storage in walk.storages_by_node.get(node, ()):
            storage.is_gradient = True
    return _sum_footprint(walk.storages, list(graph.nodes))


@final
@dataclass
class _Storage:
    """The storage of a tensor and its views, and the positions of nodes between which it lives."""

    num_bytes: int
    first_use: int
    last_use: int
    is_gradient: bool = False
    storage: torch.UntypedStorage | None = None  # kept alive, so that its id is not reused


@final
@dataclass
class _StorageTracker:
    hints: Hints
    storages: list[_Storage] = field(default_factory=list)
    storages_by_node: dict[fx.Node, list[_Storage]] = field(default_factory=dict)
    _known: dict[int, _Storage | None] = field(
        default_factory=dict
    )  # by id; None: an input or attribute

    def visit(self, position: int, node: fx.Node) -> None:
        for input_node in node.all_input_nodes:
            for storage in self.storages_by_node[input_node]:
                storage.last_use = position
        if node.target is WAIT:  # its fake result has a new storage, its real one does not
            self.storages_by_node[node] = self.storages_by_node[node.all_input_nodes[0]]
            self._alias(node, self.storages_by_node[node])
            return
        is_input = node.op in ("placeholder", "get_attr")
        self.storages_by_node[node] = list(self._find(node, position, is_input=is_input))

    def _find(self, node: fx.Node, position: int, *, is_input: bool) -> Iterator[_Storage]:
        for tensor in _tensors(node):
            untyped = tensor.untyped_storage()
            if id(untyped) not in self._known:
                num_bytes = size_hint(expression_of(untyped.nbytes()), self.hints)
                storage = _Storage(num_bytes, position, position, storage=untyped)
                self._known[id(untyped)] = None if is_input else storage
                self.storages += [] if is_input else [storage]
            known_storage = self._known[id(untyped)]
            if known_storage is not None:
                yield known_storage

    def _alias(self, node: fx.Node, storages: list[_Storage]) -> None:
        for tensor, storage in zip(_tensors(node), storages, strict=False):
            self._known[id(tensor.untyped_storage())] = storage


def _tensors(node: fx.Node) -> list[Tensor]:
    leaves = pytree_flatten(node.meta.get("val"))[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _sum_footprint(storages: list[_Storage], nodes: list[fx.Node]) -> Footprint:
    changes = [[0, 0] for _ in range(len(nodes) + 1)]  # of intermediate and gradient bytes
    for storage in storages:
        changes[storage.first_use][storage.is_gradient] += storage.num_bytes
        changes[storage.last_use + 1][storage.is_gradient] -= storage.num_bytes
    current, gradient, intermediate_peak, peak, peak_position = 0, 0, 0, 0, 0
    for position, (change, gradient_change) in enumerate(changes):
        current, gradient = current + change, gradient + gradient_change
        intermediate_peak = max(intermediate_peak, current)
        if current + gradient > peak:
            peak, peak_position = current + gradient, position
    gradient_total = sum(storage.num_bytes for storage in storages if storage.is_gradient)
    return Footprint(
        gradient_total, intermediate_peak, peak, nodes[peak_position] if peak else None
    )


def measure_rank_memory(
    source: ExportedProgram,
    graph: ShardingGraph,
    coordinate: MeshCoordinate,
    fx_graph: fx.Graph,
    *,
    ranks: tuple[int, ...],
    num_gradients: int = 0,
) -> RankMemory:
    """The memory of the rank at this mesh coordinate, recorded for all of `ranks`.

    `fx_graph` is its annotated program, whose last `num_gradients` results are gradients.
    """
    parameters, buffers = _state_bytes(source, graph, coordinate)
    inputs = sum(
        local_bytes(value, graph, coordinate)
        for value, role in graph.inputs
        if role.kind == "input"
    )
    (output,) = fx_graph.find_nodes(op="output")
    results = output.args[0]
    assert isinstance(results, (list, tuple))
    gradient_nodes = results[len(results) - num_gradients :] if num_gradients else ()
    footprint = measure(
        fx_graph,
        graph.sizes.hints,
        gradients=[node for node in gradient_nodes if isinstance(node, fx.Node)],
    )
    stack = (
        footprint.peak_node.meta.get("nn_module_stack") if footprint.peak_node is not None else None
    )
    return RankMemory(
        ranks=compress_ranks(ranks),
        parameter_bytes=parameters,
        buffer_bytes=buffers,
        input_bytes=inputs,
        gradient_bytes=footprint.gradient_bytes,
        intermediate_bytes=footprint.intermediate_bytes,
        peak_bytes=parameters + buffers + inputs + footprint.peak_bytes,
        peak_node="" if footprint.peak_node is None else footprint.peak_node.name,
        peak_module=list(stack.values())[-1][0] if stack else "",
    )


def local_bytes(value: Value, graph: ShardingGraph, coordinate: MeshCoordinate) -> int:
    """The bytes of a rank's shard of a value; 0 if it is no tensor."""
    return 0 if value.dtype is None else _bytes(value.spec, value.dtype, graph, coordinate)


def _bytes(
    spec: ShardSpec, dtype: torch.dtype, graph: ShardingGraph, coordinate: MeshCoordinate
) -> int:
    num_elements = size_hint(product(spec.local_shape(coordinate)), graph.sizes.hints)
    return num_elements * dtype.itemsize


def _state_bytes(
    source: ExportedProgram, graph: ShardingGraph, coordinate: MeshCoordinate
) -> tuple[int, int]:
    """Bytes of parameters, and of buffers and constants; a tied tensor counts once."""
    specs = {role.name: value.spec for value, role in graph.inputs if value.is_tensor}
    state = {**source.constants, **source.state_dict}
    spec_by_id = {id(tensor): specs[name] for name, tensor in state.items() if name in specs}
    totals = [0, 0]
    for is_buffer, tensor in _unique_tensors(source, state):
        replicated = ShardSpec(tuple(tensor.shape), ())
        spec = spec_by_id.get(id(tensor))
        local_spec = replicated if spec is None else spec
        totals[is_buffer] += _bytes(
            local_spec, tensor.dtype, graph, coordinate if spec else MeshCoordinate((), ())
        )
    return totals[0], totals[1]


def _unique_tensors(
    source: ExportedProgram, state: dict[str, object]
) -> Iterator[tuple[bool, Tensor]]:
    parameters = set(source.graph_signature.parameters)
    seen: set[int] = set()
    # Parameters first: a tensor that is also a buffer counts as a parameter.
    for name in sorted(state, key=lambda name: name not in parameters):
        tensor = state[name]
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name not in parameters, tensor
