"""Extracts any subset of a graph's ops as a new graph, with the inputs they had in the full
graph.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

from torch import Tensor, fx, nn

from shardscope.compile.diagnose.subgraph.eager_trace import (
    EagerTrace,
    SnapshotRequest,
    Switches,
    TensorSnapshot,
    TraceStep,
    copy_state,
    is_call,
    serves_level,
)
from shardscope.compile.diagnose.subgraph.subgraph import (
    Subgraph,
    is_non_leaf,
    make_non_leaf,
    map_leaves,
)


@final
@dataclass(eq=False, slots=True)
class _StorageState:
    """The storage and version in the full graph that a storage of the extracted graph
    represents.
    """

    storage: int
    version: int
    subgraph_input: SubgraphInput | None = None

    def is_current(self, snapshot: TensorSnapshot) -> bool:
        return (self.storage, self.version) == (snapshot.storage, snapshot.version)


@final
@dataclass(eq=False, slots=True)
class SubgraphInput:
    """An input of the extracted graph: a tensor, or another value that the program received."""

    node: fx.Node  # the node in the full graph
    request: SnapshotRequest | None
    is_entire_value: bool  # the node's value is this tensor, not a tuple of several
    is_written: bool = False

    @property
    def requires_grad(self) -> bool:
        """Whether the tensor required grad when it was read."""
        return self.request is not None and self.request.snapshot.requires_grad


@final
class ExtractionPlan:
    """The inputs of an extracted graph, and where each of its steps reads its values from."""

    def __init__(self, trace: EagerTrace, kept_nodes: frozenset[fx.Node]) -> None:
        self._results = trace.results
        self._written = trace.written
        self._storage_states: dict[tuple[fx.Node, int], _StorageState] = {}
        self._inputs_by_tensor: dict[tuple[fx.Node, int], SubgraphInput] = {}
        self.kept_nodes = kept_nodes
        self.inputs: list[SubgraphInput] = []
        self.attributes: dict[fx.Node, None] = {}
        self.sources: dict[fx.Node, dict[fx.Node, Any]] = {}  # by reader, then by source
        for index, step in enumerate(trace.steps):
            if step.nodes[0] in kept_nodes:
                self._plan_step(index, step)

    def _plan_step(self, index: int, step: TraceStep) -> None:
        sources = {node: self._source(index, node, value) for node, value in step.reads.items()}
        self.sources.update(dict.fromkeys(step.nodes, sources))
        read_states = [
            self._storage_states[key]
            for key, _ in _number_tensors(step.reads)
            if key in self._storage_states
        ]
        for storage in step.writes:
            _write({state for state in read_states if state.storage == storage})
        results = {node: self._results[node] for node in step.nodes if node in self._results}
        self._store_results(results, set(read_states))

    def _source(self, index: int, node: fx.Node, value: Any) -> Any:
        """The node itself, if it is extracted and its value is still current; otherwise inputs."""
        if node.op == "get_attr" and self._is_constant(value):
            self.attributes[node] = None
            return node
        tensors = dict(_number_tensors({node: value}))
        is_current = all(self._is_current(key, snapshot) for key, snapshot in tensors.items())
        if (
            node in self.kept_nodes
            and is_current
            and self._inputs_by_tensor.keys().isdisjoint(tensors)
        ):
            return node
        if node.op == "placeholder" and not tensors:
            return self._program_input(node)
        counter = itertools.count()
        return map_leaves(
            value,
            TensorSnapshot,
            lambda snapshot: self._tensor_input(
                SnapshotRequest(index, node, next(counter), snapshot), value
            ),
        )

    def _is_constant(self, value: Any) -> bool:
        return isinstance(value, nn.Module) or self._written.isdisjoint(
            snapshot.storage for snapshot in snapshots_in(value)
        )

    def _is_current(self, key: tuple[fx.Node, int], snapshot: TensorSnapshot) -> bool:
        state = self._storage_states.get(key)
        return state is not None and state.is_current(snapshot)

    def _program_input(self, node: fx.Node) -> SubgraphInput:
        """The input for a value of the program that is not a tensor."""
        if (node, 0) not in self._inputs_by_tensor:
            self._inputs_by_tensor[node, 0] = SubgraphInput(node, None, is_entire_value=True)
            self.inputs.append(self._inputs_by_tensor[node, 0])
        return self._inputs_by_tensor[node, 0]

    def _tensor_input(self, request: SnapshotRequest, value: Any) -> SubgraphInput:
        key = (request.node, request.position)
        if key not in self._inputs_by_tensor or not self._is_current(key, request.snapshot):
            subgraph_input = SubgraphInput(
                request.node, request, is_entire_value=value is request.snapshot
            )
            self.inputs.append(subgraph_input)
            self._inputs_by_tensor[key] = subgraph_input
            self._storage_states[key] = _StorageState(
                request.snapshot.storage, request.snapshot.version, subgraph_input
            )
        return self._inputs_by_tensor[key]

    def _store_results(self, results: dict[fx.Node, Any], read_states: set[_StorageState]) -> None:
        """Results of a step are in storages that it read, or in new ones."""
        own: dict[int, _StorageState] = {}
        for key, snapshot in _number_tensors(results):
            shared = [state for state in read_states if state.is_current(snapshot)]
            new = own.setdefault(
                snapshot.storage, _StorageState(snapshot.storage, snapshot.version)
            )
            self._storage_states[key] = shared[0] if len(shared) == 1 else new


def _write(states: set[_StorageState]) -> None:
    for state in states:
        # With several candidates it is unknown which was written to: none counts as current.
        state.version += len(states) == 1
        if state.subgraph_input is not None:
            state.subgraph_input.is_written = True


def snapshots_in(value: Any) -> Iterator[TensorSnapshot]:
    """The tensor snapshots in a value."""
    snapshots: list[TensorSnapshot] = []
    map_leaves(value, TensorSnapshot, snapshots.append)
    return iter(snapshots)


def _number_tensors(
    values: dict[fx.Node, Any],
) -> Iterator[tuple[tuple[fx.Node, int], TensorSnapshot]]:
    for node, value in values.items():
        for position, snapshot in enumerate(snapshots_in(value)):
            yield (node, position), snapshot


_ORIGIN = ("stack_trace", "nn_module_stack", "source_fn_stack")


@final
class SubgraphBuilder:
    """Builds the extracted graph. Nodes keep their names."""

    def __init__(
        self,
        subgraph: Subgraph,
        trace: EagerTrace,
        plan: ExtractionPlan,
        *,
        outputs_all: bool = False,
    ) -> None:
        self._subgraph = subgraph
        self._trace = trace
        self._plan = plan
        self._outputs_all = outputs_all
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._inputs: dict[SubgraphInput, fx.Node] = {}

    def build(self) -> Subgraph:
        """The extracted subgraph."""
        self._add_inputs()
        nodes = list(self._subgraph.graph.graph.nodes)
        for node in nodes:
            if node in self._plan.attributes or node in self._plan.kept_nodes:
                sources = self._plan.sources.get(node, {})
                self._copies[node] = self._graph.node_copy(node, self._reader(sources))
        self._graph.output(tuple(self._outputs()))
        used = [*self._plan.attributes, *self._plan.kept_nodes]
        state = copy_state(self._subgraph.graph, used)
        module = fx.GraphModule(state, self._graph)
        return replace(self._subgraph, graph=module, inputs=tuple(self._values()))

    def _reader(self, sources: dict[fx.Node, Any]) -> Any:
        def read(node: fx.Node) -> Any:
            source = sources.get(node, node)
            if isinstance(source, fx.Node):
                return self._copies[source]
            return map_leaves(source, SubgraphInput, self._inputs.__getitem__)

        return read

    def _add_inputs(self) -> None:
        # Extracted nodes have precedence for their names.
        used_names = {node.name for node in self._subgraph.graph.graph.nodes}
        free = used_names - {node.name for node in self._plan.kept_nodes}
        for subgraph_input in self._plan.inputs:
            name = subgraph_input.node.name
            if not subgraph_input.is_entire_value or name not in free:
                name = _make_unique_name(f"{name}_given", used_names)
            free.discard(name)
            copy = self._graph.create_node("placeholder", name, name=name)
            copy.meta = {
                key: value
                for key, value in subgraph_input.node.meta.items()
                if subgraph_input.is_entire_value or key in _ORIGIN
            }
            self._inputs[subgraph_input] = copy
        for subgraph_input, copy in self._inputs.items():
            # A program cannot write to a leaf that requires grad, so the input is cloned first.
            if subgraph_input.is_written and self._has_gradient(subgraph_input):
                name = _make_unique_name(f"{copy.name}_written", used_names)
                clone = self._graph.create_node("call_method", "clone", (copy,), name=name)
                self._inputs[subgraph_input] = clone

    def _values(self) -> Iterator[Any]:
        requests = [
            subgraph_input.request
            for subgraph_input in self._plan.inputs
            if subgraph_input.request is not None
        ]
        copies = self._trace.copy_values(requests)
        computed = self._find_non_leaves()
        for subgraph_input in self._plan.inputs:
            if subgraph_input.request is None:
                yield self._trace.results[subgraph_input.node]
                continue
            leaf = copies[subgraph_input.request].requires_grad_(self._has_gradient(subgraph_input))
            yield (
                make_non_leaf(leaf)
                if leaf.requires_grad and subgraph_input.node in computed
                else leaf
            )

    def _find_non_leaves(self) -> set[fx.Node]:
        """The placeholders whose values were non-leaf tensors."""
        placeholders = self._subgraph.graph.graph.find_nodes(op="placeholder")
        pairs = zip(placeholders, self._subgraph.inputs, strict=True)
        return {node for node, value in pairs if isinstance(value, Tensor) and is_non_leaf(value)}

    def _has_gradient(self, subgraph_input: SubgraphInput) -> bool:
        return subgraph_input.requires_grad and self._subgraph.with_gradients

    def _outputs(self) -> Iterator[fx.Node]:
        """What other ops read; otherwise what is written to; otherwise the last result."""
        shown = [part for node in self._copies for part in self._shown_parts(node)]
        written = [
            self._inputs[subgraph_input]
            for subgraph_input in self._plan.inputs
            if subgraph_input.is_written
        ]
        last = [copy for node, copy in self._copies.items() if node in self._plan.sources]
        yield from shown or written or last[-1:]

    def _shown_parts(self, node: fx.Node) -> Iterator[fx.Node]:
        value = self._trace.results.get(node)
        is_read = any(user not in self._plan.kept_nodes for user in node.users)
        if node not in self._plan.sources:
            return
        if isinstance(value, TensorSnapshot) and (is_read or self._outputs_all):
            yield self._copies[node]
        elif isinstance(value, tuple | list) and is_read:
            yield from self._unpack(self._copies[node], value)

    def _unpack(self, copy: fx.Node, value: Any) -> Iterator[fx.Node]:
        for index, part in enumerate(value):
            if next(snapshots_in(part), None) is not None:
                item = self._graph.call_function(operator.getitem, (copy, index))
                yield from [item] if isinstance(part, TensorSnapshot) else self._unpack(item, part)


def _make_unique_name(name: str, used_names: set[str]) -> str:
    names = (f"{name}_{number}" for number in itertools.count(1))
    free = next(candidate for candidate in names if candidate not in used_names)
    used_names.add(free)
    return free


_MAX_BYTES = 4 << 30
_OUTPUT = re.compile(r"output (\d+)")


@final
class RecordedGraph:
    """A subgraph that was run eagerly once, from which subsets of ops can be extracted."""

    def __init__(self, subgraph: Subgraph, *, seed: int = 0, max_bytes: int = _MAX_BYTES) -> None:
        self._subgraph = subgraph
        self._trace = EagerTrace(subgraph, seed=seed, max_bytes=max_bytes)
        self._switches = Switches(step.nodes for step in self._trace.steps)
        self._leaders = dict[fx.Node, fx.Node]()
        for step in self._trace.steps:
            self._leaders.update(dict.fromkeys(step.nodes, self._leader(step.nodes)))

    def _leader(self, nodes: tuple[fx.Node, ...]) -> fx.Node:
        """The op that represents a step: a `getitem` belongs to the op that returned the tuple."""
        if len(nodes) > 1:
            written = [node for node in nodes if not serves_level(node)]
            return (written or list(nodes))[0]
        (node,) = nodes
        source = node.args[0] if node.target is operator.getitem else None
        is_part = isinstance(source, fx.Node) and isinstance(
            self._trace.results[source], tuple | list | dict
        )
        return self._leaders.get(source, node) if is_part else node  # type: ignore[arg-type]

    @cached_property
    def ops(self) -> tuple[str, ...]:
        """The names of the ops that can be left out, in the order of the program."""
        leaders = dict.fromkeys(self._leaders.values())
        return tuple(node.name for node in leaders if node not in self._switches)

    @cached_property
    def reads(self) -> Mapping[str, tuple[str, ...]]:
        """The ops whose results each op reads."""
        sources_by_op: dict[str, dict[str, None]] = {name: {} for name in self.ops}
        for node, leader in self._leaders.items():
            sources = [
                self._leaders[source] for source in node.all_input_nodes if source in self._leaders
            ]
            names = [source.name for source in sources if source is not leader]
            sources_by_op.get(leader.name, {}).update(dict.fromkeys(names))
        return {name: tuple(sources) for name, sources in sources_by_op.items()}

    def extract(self, keep: Collection[str], *, outputs_all: bool = False) -> Subgraph:
        """The subgraph of exactly these ops, with the mode switches that they need.

        Its outputs are the values that other ops read, or every tensor that it computes.
        """
        names = set(keep)
        kept_nodes = {
            node
            for node, leader in self._leaders.items()
            if leader.name in names and node not in self._switches
        }
        nodes = self._subgraph.graph.graph.nodes
        has_grad = self._subgraph.with_gradients
        kept_nodes |= self._switches.needed_by(nodes, frozenset(kept_nodes), has_grad=has_grad)
        plan = ExtractionPlan(self._trace, frozenset(kept_nodes))
        return SubgraphBuilder(self._subgraph, self._trace, plan, outputs_all=outputs_all).build()

    def output_all_values(self) -> Subgraph:
        """The same subgraph with every intermediate tensor as a further output.

        It shows errors that later ops hide, for example by multiplying with zero.
        """
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self._subgraph.graph.graph.nodes:
            if node.op != "output":
                copies[node] = graph.node_copy(node, copies.__getitem__)
                continue
            own_nodes = set(node.all_input_nodes)
            shown = [
                source for source in copies if self._is_tensor(source) and source not in own_nodes
            ]
            own = fx.node.map_arg(node.args[0], copies.__getitem__)
            graph.output((*own, *(copies[source] for source in shown)))
        module = fx.GraphModule(self._subgraph.graph, graph)
        return replace(self._subgraph, graph=module)

    def _is_tensor(self, node: fx.Node) -> bool:
        return is_call(node) and isinstance(self._trace.results.get(node), TensorSnapshot)


def in_order(subgraph: Subgraph) -> Subgraph:
    """The same subgraph with its outputs in the order in which they are computed."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in subgraph.graph.graph.nodes:
        if node.op != "output":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    (last,) = subgraph.graph.graph.find_nodes(op="output")
    output_nodes = set(last.all_input_nodes)
    graph.output(tuple(copies[node] for node in copies if node in output_nodes))
    return replace(subgraph, graph=fx.GraphModule(subgraph.graph, graph))


def name_output(subgraph: Subgraph, output: str) -> str:
    """The name of the node that returns `output 3`; empty if there is no such output."""
    match = _OUTPUT.fullmatch(output)
    (last,) = subgraph.graph.graph.find_nodes(op="output")
    return str(last.args[0][int(match[1])].name) if match else ""
