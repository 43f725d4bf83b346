"""One eager run of a graph, recorded node by node: reads, writes and results.

The nodes are divided into steps that must stay together (`split_into_steps`), and those that switch
autocast, gradients and other modes are set apart (`Switches`).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, final

import torch
from torch import fx, nn

from shardscope._torch.graph import (
    EXITS,
    SET_GRAD_ENABLED,
    SETTERS,
    closes_level,
    is_level_machinery,
    opens_level,
    unwraps,
)
from shardscope._torch.random_state import seed_torch
from shardscope._torch.storage import count_writes
from shardscope.compile.diagnose.subgraph.subgraph import (
    Subgraph,
    copy_inputs,
    copy_tensor,
    has_memory,
    make_non_leaf,
    map_tensors,
    tensors_in,
)

_ENTERS = frozenset(EXITS.values())


def is_call(node: fx.Node) -> bool:
    """Whether the node calls a function, method or module."""
    return node.op in ("call_function", "call_method", "call_module")


def split_into_steps(graph: fx.Graph) -> list[tuple[fx.Node, ...]]:
    """The calls of a graph as steps; all calls inside a vmap or grad form one step."""
    calls = [node for node in graph.nodes if is_call(node)]
    positions = {node: position for position, node in enumerate(calls)}
    steps: list[tuple[fx.Node, ...]] = []
    position = 0
    while position < len(calls):
        end = _find_end(calls, position, positions)
        steps.append(tuple(calls[position:end]))
        position = end
    return steps


def _find_end(calls: list[fx.Node], start: int, positions: dict[fx.Node, int]) -> int:
    """The end of the step that begins at `start`."""
    depth, end, last = 0, start, start
    while end < len(calls):
        node = calls[end]
        depth += opens_level(node.target) - closes_level(node.target)
        # Before a level opens, only calls that prepare it belong to the step.
        is_inside = depth > 0 or (_prepares_level(node) and last <= end)
        if not unwraps(node.target) and (is_inside or end < last):
            # Wrapped values of a level may be read after it, and must be read in this step.
            last = max([last, *(positions[user] for user in node.users if user in positions)])
        end += 1
        if not is_inside and end > last:
            break
    return end


def serves_level(node: fx.Node) -> bool:
    """Whether the call is part of vmap, grad or jvp, and not an op that the user wrote."""
    return is_level_machinery(node.target) or node.target in SETTERS


def _prepares_level(node: fx.Node) -> bool:
    return is_level_machinery(node.target) and not node.users and not closes_level(node.target)


@final
class Switches:
    """The calls that switch gradients, autocast and other modes on and off."""

    def __init__(self, steps: Iterable[tuple[fx.Node, ...]]) -> None:
        self.nodes: set[fx.Node] = set()
        # Backwards, so that calls that only serve a switch come after it.
        for step in reversed(list(steps)):
            if len(step) == 1 and self._is_switch(step[0]):
                self.nodes.add(step[0])

    def __contains__(self, node: fx.Node) -> bool:
        return node in self.nodes

    def _is_switch(self, node: fx.Node) -> bool:
        serves = bool(node.users) and all(user in self.nodes for user in node.users)
        return node.target in SETTERS or node.target in EXITS or node.target in _ENTERS or serves

    def needed_by(
        self, nodes: Iterable[fx.Node], kept_nodes: frozenset[fx.Node], *, has_grad: bool
    ) -> set[fx.Node]:
        """The switches that the kept nodes need to run in the same mode as before."""
        needed: set[fx.Node] = set()
        waiting: list[fx.Node] = []
        states: dict[str, Any] = {SETTERS[SET_GRAD_ENABLED]: (SET_GRAD_ENABLED, (has_grad,))}
        for node in nodes:
            if node in self.nodes:
                waiting.append(node)
            elif node in kept_nodes:
                needed |= _reduce_switches(waiting, states)
                waiting = []
        return needed | _reduce_switches(waiting, states)


def _reduce_switches(waiting: list[fx.Node], states: dict[str, Any]) -> set[fx.Node]:
    """The switches with an effect among those between two ops, and the nodes that they read."""
    undone = {node.args[0] for node in waiting if node.target in EXITS}
    left = {
        node
        for node in waiting
        if (node.target in _ENTERS and node not in undone)
        or (node.target in EXITS and node.args[0] not in waiting)
    }
    left |= set(_reduce_setters(waiting, states))
    for node in reversed(waiting):
        if not left.isdisjoint(node.users) and node.target not in _ENTERS:
            left.add(node)
    return left


def _reduce_setters(waiting: list[fx.Node], states: dict[str, Any]) -> Iterator[fx.Node]:
    for kind in sorted(set(SETTERS.values())):
        setters = [node for node in waiting if SETTERS.get(_target(node)) == kind]
        # An even number of setters restores the previous state, known or not.
        if not setters or (kind not in states and len(setters) % 2 == 0):
            continue
        state = (setters[-1].target, setters[-1].args)
        if states.get(kind) != state:
            states[kind] = state
            yield setters[-1]


def _target(node: fx.Node) -> Any:
    return node.target


@final
class EagerRun:
    """An eager run in progress. Random numbers come from `seed`; the generators are restored."""

    def __init__(self, subgraph: Subgraph, *, seed: int) -> None:
        graph = subgraph.graph.graph
        self.steps = split_into_steps(graph)
        self._has_grad = subgraph.with_gradients
        self._seed = seed
        self._switches = Switches(self.steps)
        self._num_done = 0
        self._last_uses = self._find_last_uses()
        self._cleanup = ExitStack()
        self._devices = {
            tensor.device.index for tensor in tensors_in(subgraph.inputs) if tensor.is_cuda
        }
        self._interpreter = _Interpreter(subgraph)
        self.values: dict[fx.Node, Any] = self._interpreter.env

    def __enter__(self) -> EagerRun:
        self._cleanup.enter_context(torch.random.fork_rng(devices=sorted(self._devices)))
        self._cleanup.enter_context(torch.set_grad_enabled(self._has_grad))
        seed_torch(self._seed)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._cleanup:
            # A run that ended early has enabled modes that later steps disable.
            for nodes in self.steps[self._num_done :]:
                if nodes[0] in self._switches:
                    self._run(nodes)

    def execute(self, nodes: tuple[fx.Node, ...]) -> None:
        """Run the next step."""
        assert nodes == self.steps[self._num_done]
        self._num_done += 1
        self._run(nodes)

    def _run(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            self.values[node] = self._interpreter.run_node(node)

    def forget(self) -> None:
        """Drop values that no later step reads."""
        for node in self._last_uses.get(self._num_done - 1, ()):
            self.values.pop(node, None)

    def _find_last_uses(self) -> dict[int, list[fx.Node]]:
        last: dict[fx.Node, int] = {}
        for index, nodes in enumerate(self.steps):
            for node in nodes:
                last[node] = index
                last.update(dict.fromkeys(node.all_input_nodes, index))
        by_step: dict[int, list[fx.Node]] = {}
        for node, index in last.items():
            by_step.setdefault(index, []).append(node)
        return by_step


@final
class _Interpreter(fx.Interpreter):
    """An interpreter with the inputs and attributes of a graph, before any op has run."""

    def __init__(self, subgraph: Subgraph) -> None:
        graph = subgraph.graph.graph
        super().__init__(subgraph.graph, garbage_collect_values=False, graph=graph)
        self._state = copy_state(subgraph.graph, graph.nodes)
        with torch.set_grad_enabled(subgraph.with_gradients):
            self.args_iter = iter([_as_non_leaf(value) for value in copy_inputs(subgraph.inputs)])
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.env[node] = self.run_node(node)

    def fetch_attr(self, target: str) -> Any:
        """The copied attribute that a node refers to."""
        return self._state[target]


def _as_non_leaf(value: Any) -> Any:
    """A non-leaf copy of an input, because a program may not write to a leaf in place."""
    needs_gradient = isinstance(value, torch.Tensor) and value.requires_grad
    return make_non_leaf(value) if needs_gradient and torch.is_grad_enabled() else value


def copy_state(root: nn.Module, nodes: Iterable[fx.Node]) -> dict[str, Any]:
    """The attributes that these nodes refer to, copied if running the graph could change them."""
    targets = [str(node.target) for node in nodes if node.op in ("get_attr", "call_module")]
    return {target: _copy(_find(root, target)) for target in targets}


def _find(root: nn.Module, target: str) -> Any:
    value: Any = root
    for name in target.split("."):
        value = getattr(value, name)
    return value


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return copy_tensor(value).requires_grad_(value.requires_grad)
    # The bodies of higher-order ops have no state, and may not be copyable.
    has_state = isinstance(value, nn.Module) and bool(value.state_dict())
    return copy.deepcopy(value) if has_state else value


_NO_STORAGE = -1  # number for tensors without accessible memory


@final
@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """A tensor's dtype, device, sizes, strides and offset in its storage."""

    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> MemoryLayout:
        """The layout of a tensor that has memory."""
        return MemoryLayout(
            tensor.dtype,
            tensor.device,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    @torch.no_grad()
    def fill(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A tensor with this layout in `storage`; a negated tensor is a new one."""
        tensor = torch.empty(0, dtype=self.dtype, device=self.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        tensor = tensor.conj() if self.is_conj else tensor
        return -tensor if self.is_neg else tensor


@final
@dataclass(frozen=True, slots=True, eq=False)
class TensorSnapshot:
    """A tensor at one moment: its storage, and how often the storage was written to."""

    storage: int
    version: int
    requires_grad: bool
    shape: MemoryLayout | torch.Tensor  # the tensor itself, if its memory is not accessible


@final
@dataclass(frozen=True, slots=True)
class TraceStep:
    """One call, or several calls that must run together."""

    nodes: tuple[fx.Node, ...]
    reads: dict[fx.Node, Any]  # from other steps: values with `TensorSnapshot` for tensors
    writes: frozenset[int]  # the storages that it changed


@final
@dataclass(frozen=True, slots=True, eq=False)
class SnapshotRequest:
    """Asks for a tensor of a node's value as it was before a step."""

    step: int
    node: fx.Node
    position: int  # among the tensors of the node's value
    snapshot: TensorSnapshot


@final
class EagerTrace:
    """The steps of an eager run, and the value of every node at every step.

    Values are stored up to `max_bytes`; beyond that they are recomputed on request.
    """

    def __init__(self, subgraph: Subgraph, *, seed: int, max_bytes: int) -> None:
        self._subgraph = subgraph
        self._seed = seed
        self._num_bytes_left = max_bytes
        self._numbers: dict[int, int] = {}  # of storages, by address
        self._versions: dict[int, int] = {_NO_STORAGE: 0}
        self._latest: dict[int, torch.UntypedStorage] = {}
        self._older: dict[tuple[int, int], torch.UntypedStorage] = {}  # contents before a write
        self.steps: list[TraceStep] = []
        self.results: dict[fx.Node, Any] = {}  # values with `TensorSnapshot` for tensors
        self._record()

    @property
    def has_all_values(self) -> bool:
        """Whether all values are stored, so that nothing has to be recomputed."""
        return self._num_bytes_left >= 0

    @property
    def written(self) -> frozenset[int]:
        """The storages that any step changed."""
        return frozenset(number for step in self.steps for number in step.writes)

    def copy_values(
        self, requests: Collection[SnapshotRequest]
    ) -> dict[SnapshotRequest, torch.Tensor]:
        """The requested tensors as they were, without gradients, each in new memory."""
        if self.has_all_values:
            return {request: self._restore(request.snapshot) for request in requests}
        copies: dict[SnapshotRequest, torch.Tensor] = {}
        by_step: dict[int, list[SnapshotRequest]] = {}
        for request in requests:
            by_step.setdefault(request.step, []).append(request)
        with EagerRun(self._subgraph, seed=self._seed) as run:
            for index in range(max(by_step, default=-1) + 1):
                for request in by_step.get(index, ()):
                    tensors = list(tensors_in(run.values[request.node]))
                    copies[request] = copy_tensor(tensors[request.position])
                run.execute(run.steps[index])
                run.forget()
        return copies

    def _restore(self, snapshot: TensorSnapshot) -> torch.Tensor:
        if isinstance(snapshot.shape, torch.Tensor):
            return copy_tensor(snapshot.shape)
        storage = self._older.get(
            (snapshot.storage, snapshot.version), self._latest[snapshot.storage]
        )
        return copy_tensor(snapshot.shape.fill(storage))

    def _record(self) -> None:
        with EagerRun(self._subgraph, seed=self._seed) as run:
            for node, value in run.values.items():
                self.results[node] = map_tensors(value, self._take_snapshot)
            for nodes in run.steps:
                self._record_step(run, nodes)

    def _record_step(self, run: EagerRun, nodes: tuple[fx.Node, ...]) -> None:
        sources = [node for node in _sources(nodes) if node in run.values]
        reads = {node: map_tensors(run.values[node], self._take_snapshot) for node in sources}
        reachable = {
            self._storage_number(tensor): tensor
            for node in sources
            for tensor in tensors_in(run.values[node])
        }
        reachable.pop(_NO_STORAGE, None)
        before = {number: _bytes_of(tensor).clone() for number, tensor in reachable.items()}
        num_writes = {number: count_writes(tensor) for number, tensor in reachable.items()}
        run.execute(nodes)
        writes = [
            number
            for number, tensor in reachable.items()
            if count_writes(tensor) != num_writes[number]
            or not torch.equal(before[number], _bytes_of(tensor))
        ]
        for number in writes:
            self._write(number, before[number])
        for node in _visible_outside(nodes):
            self.results[node] = map_tensors(run.values[node], self._take_snapshot)
        self.steps.append(TraceStep(nodes, reads, frozenset(writes)))
        run.forget()
        if not self.has_all_values:
            self._forget(run)

    def _take_snapshot(self, tensor: torch.Tensor) -> TensorSnapshot:
        number = self._storage_number(tensor)
        shape = tensor.detach() if number == _NO_STORAGE else MemoryLayout.of(tensor)
        return TensorSnapshot(number, self._versions[number], tensor.requires_grad, shape)

    def _storage_number(self, tensor: torch.Tensor) -> int:
        if not has_memory(tensor) or tensor.untyped_storage().data_ptr() == 0:
            return _NO_STORAGE
        storage = tensor.untyped_storage()
        number = self._numbers.setdefault(storage.data_ptr(), len(self._versions))
        if number not in self._versions:
            self._versions[number] = 0
            self._reserve(storage.nbytes())
            if self.has_all_values:
                self._latest[number] = storage
        return number

    def _write(self, number: int, before: torch.Tensor) -> None:
        self._reserve(before.nbytes)
        if self.has_all_values:
            self._older[number, self._versions[number]] = before.untyped_storage()
        self._versions[number] += 1

    def _reserve(self, num_bytes: int) -> None:
        self._num_bytes_left -= num_bytes if self.has_all_values else 0

    def _forget(self, run: EagerRun) -> None:
        """Store no values; an address may be reused as soon as no value is there."""
        self._latest.clear()
        self._older.clear()
        tensors = tensors_in(list(run.values.values()))
        used = {tensor.untyped_storage().data_ptr() for tensor in tensors if has_memory(tensor)}
        self._numbers = {key: number for key, number in self._numbers.items() if key in used}


def _sources(nodes: tuple[fx.Node, ...]) -> Iterable[fx.Node]:
    inside = set(nodes)
    sources = [source for node in nodes for source in node.all_input_nodes if source not in inside]
    return dict.fromkeys(sources)


def _visible_outside(nodes: tuple[fx.Node, ...]) -> Iterable[fx.Node]:
    """Nodes whose values other steps may read: inside vmap values are wrapped tensors."""
    if len(nodes) == 1:
        return nodes
    inside = set(nodes)
    return [node for node in nodes if any(user not in inside for user in node.users)]


@torch.no_grad()
def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())
