"""Counts of collectives under the keys that torch gives them: op packets, modules, two passes."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from typing import Any, final

import torch

from shardscope._torch.calls import OPS
from shardscope.comm.debug.position import GLOBAL

__all__ = ["CollectiveCounts", "named_packet", "op_key", "torch_registry", "watched_packets"]

_FUNCTIONAL = ("_c10d_functional", "_c10d_functional_autograd")


@final
class CollectiveCounts:
    """Counts in all, and by module and pass, where a module's include those of what it encloses."""

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
    """The packet of `op` itself."""
    return _packet(*op.split("."))


@cache
def op_key(op: str) -> Any:
    """The packet under which `op`, such as `_c10d_functional.all_reduce_`, is counted."""
    namespace, name = op.split(".")
    if namespace in _FUNCTIONAL:
        # People's tests ask for the older namespace, and for one name whichever variant ran.
        older = _packet("c10d_functional", _base_name(name))
        if older is not None:
            return older
    return _packet(namespace, name)


def _packet(namespace: str, name: str) -> Any:
    """None where this torch has no such op."""
    return getattr(getattr(torch.ops, namespace), name, None)


def _base_name(name: str) -> str:
    return name.removesuffix("_out").removesuffix("_")


@cache
def watched_packets() -> frozenset[Any]:
    """The packets of every op that we watch for, under their own names."""
    packets = (_packet(namespace, name) for namespace, names in OPS.items() for name in names)
    return frozenset(packet for packet in packets if packet is not None)


def torch_registry() -> set[Any]:
    """What torch puts into `comm_registry`: functional collectives in both namespaces."""
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
