"""Collectives and ops counted by module and pass, under the keys that torch's CommDebugMode
uses.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardscope._torch.autograd import (
    NO_GRAPH_TASK,
    current_graph_task,
    current_node,
    find_recomputed,
    method_owner,
    next_sequence_number,
    node_origin,
    reentrant_nodes,
)
from shardscope._torch.collectives.schema import OPS
from shardscope._torch.tree import leaves
from shardscope.attribution.call_sites import find_backward_caller, read_stack
from shardscope.attribution.module_calls import ModuleCalls
from shardscope.attribution.module_names import NO_MODULE, ModuleNames

GLOBAL = "Global"
"""torch's name for what encloses every module."""


class Position(NamedTuple):
    """The running module, and whether it is in backward or recomputed."""

    module: str
    is_backward: bool
    is_recompute: bool


class _Call(NamedTuple):
    module: str
    graph_task: int


class _Thread(threading.local):
    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.task = NO_GRAPH_TASK
        self.caller = 0  # the thread that called backward `task`


@final
class Positions:
    """Observes module calls, each after `calls` has; gives the current position."""

    def __init__(self, names: ModuleNames, calls: ModuleCalls) -> None:
        self._names = names
        self._calls = calls
        self._thread = _Thread()

    def enter(self, _: nn.Module) -> None:
        """Note a call; `calls` has already found its module."""
        call = _Call(self._name(self._calls.running()), current_graph_task())
        self._thread.calls.append(call)

    def exit(self, _: nn.Module) -> None:
        """Note the end of the innermost call on this thread."""
        calls = self._thread.calls
        if calls:  # empty for a call that began before module calls were observed
            calls.pop()

    def running(self) -> list[str]:
        """The modules called on this thread, outermost first."""
        return [call.module for call in self._thread.calls]

    def current(self) -> Position:
        """The position of this thread."""
        task = current_graph_task()
        calls = self._thread.calls
        is_backward = task != NO_GRAPH_TASK
        if calls and calls[-1].graph_task == task:
            return Position(calls[-1].module, is_backward, is_backward)
        if not is_backward:
            return Position(GLOBAL, False, False)
        function = find_recomputed(sys._getframe())
        module = method_owner(function)
        index = self._backward_module(task) if module is None else self._names.find(module)
        return Position(self._name(index), True, function is not None)

    def _backward_module(self, task: int) -> int:
        """The module whose backward runs, or whose checkpointed function is recomputed."""
        node = current_node()
        if node is None:  # a callback at the end of backward
            return NO_MODULE
        creator = self._creator(node, task)
        if creator == NO_MODULE:  # the node may have been created during recomputation
            creators = (self._creator(node, task) for node in reentrant_nodes(sys._getframe()))
            creator = next((creator for creator in creators if creator != NO_MODULE), NO_MODULE)
        return creator

    def _creator(self, node: Any, task: int) -> int:
        origin = node_origin(node)
        if isinstance(origin, torch.Tensor):
            return self._names.owner_of(origin)
        caller = self._caller(task)
        reached = next_sequence_number() if caller == threading.get_ident() else None
        creator = self._calls.creator_of(origin, caller, reached=reached)
        return NO_MODULE if creator is None else creator

    def _caller(self, task: int) -> int:
        """The thread that called backward; cached per graph task."""
        thread = self._thread
        if thread.task != task:
            stack = read_stack(sys._getframe())
            if not stack.backward_caller:
                find_backward_caller(stack)
            thread.task, thread.caller = task, stack.backward_caller
        return thread.caller

    def _name(self, index: int) -> str:
        return self._names.name(index) or GLOBAL


_FUNCTIONAL = ("_c10d_functional", "_c10d_functional_autograd")


@final
class CollectiveCounts:
    """Total counts, and counts by module and pass; a module's include its children's."""

    def __init__(self) -> None:
        self.total: dict[Any, int] = defaultdict(int)
        self.by_module: dict[str, dict[str, dict[Any, int]]] = {}
        self._lock = threading.Lock()
        self._passes(GLOBAL)

    def add(self, key: Any, modules: Iterable[str], *, is_backward: bool) -> None:
        """Count one collective for Global and for each of `modules`."""
        with self._lock:
            self.total[key] += 1
            for module in (GLOBAL, *modules):
                self._passes(module)["backward" if is_backward else "forward"][key] += 1

    def _passes(self, module: str) -> dict[str, dict[Any, int]]:
        if module not in self.by_module:
            self.by_module[module] = {"forward": defaultdict(int), "backward": defaultdict(int)}
        return self.by_module[module]


def named_packet(op: str) -> Any:
    """The op packet with exactly this name."""
    return _packet(*op.split("."))


@cache
def op_key(op: str) -> Any:
    """The packet under which `op`, such as `_c10d_functional.all_reduce_`, is counted."""
    namespace, name = op.split(".")
    if namespace in _FUNCTIONAL:
        # Users' tests expect the older namespace, and the same name for all variants.
        older = _packet("c10d_functional", _base_name(name))
        if older is not None:
            return older
    return _packet(namespace, name)


def _packet(namespace: str, name: str) -> Any:
    """The op packet; None if this torch has no such op."""
    return getattr(getattr(torch.ops, namespace), name, None)


def _base_name(name: str) -> str:
    return name.removesuffix("_out").removesuffix("_")


@cache
def collective_packets() -> frozenset[Any]:
    """The packets of all ops that are known collectives, under their own names."""
    packets = (_packet(namespace, name) for namespace, names in OPS.items() for name in names)
    return frozenset(packet for packet in packets if packet is not None)


def torch_registry() -> set[Any]:
    """The ops in torch's `comm_registry`: functional collectives in both namespaces."""
    functional = {
        _packet(namespace, name)
        for namespace in ("_c10d_functional", "c10d_functional")
        for name in _REGISTERED
    }
    return functional | {
        _packet("_c10d_functional_autograd", "all_to_all_single"),
        _packet("_dtensor", "shard_dim_alltoall"),
    }


_REGISTERED = (
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all_single",
    "broadcast",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
)


Operation = dict[str, Any]
"""name, input_shape, input_sharding, device_mesh, is_bw, is_activation_checkpointing."""


@final
class OperationLists:
    """`by_module` maps a module's name to torch's `{"operations_list": [...]}`."""

    def __init__(self) -> None:
        self.by_module: dict[str, dict[str, list[Operation]]] = {}
        self._known: dict[tuple[Any, ...], Operation] = {}

    def add(self, op: Any, args: Sequence[Any], module: str, position: Position) -> None:
        """Append an op to the list of `module`."""
        operation = self._operation(
            op, [leaf for leaf in leaves(args) if isinstance(leaf, DTensor)], position
        )
        lists = self.by_module.setdefault(module, {"operations_list": []})
        lists["operations_list"].append(operation)

    def _operation(self, op: Any, inputs: list[DTensor], position: Position) -> Operation:
        specs = tuple((tensor.shape, tensor.placements, tensor.device_mesh) for tensor in inputs)
        key = (op, specs, position.is_backward, position.is_recompute)
        try:
            operation = self._known.get(key)
        except TypeError:  # symbolic shapes have no hash
            return _describe(op, inputs, position)
        if operation is None:
            operation = self._known[key] = _describe(op, inputs, position)
        return operation


def _describe(op: Any, inputs: list[DTensor], position: Position) -> Operation:
    return {
        "name": op,
        "input_shape": [tensor.shape for tensor in inputs],
        "input_sharding": [tensor.placements for tensor in inputs],
        "device_mesh": str(inputs[-1].device_mesh) if inputs else "",
        "is_bw": position.is_backward,
        "is_activation_checkpointing": position.is_recompute,
    }
