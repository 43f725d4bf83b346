"""Which ops a model calls, forwards and backwards: eagerly, so that any Python in it just runs.

A dispatch mode sees the ops that autograd hands down, with the module and line they come from. In
inference mode there is no autograd, and it sees what torch.export would write down: `linear`, not
its parts. Calls that differ in nothing but their place are counted, not kept.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch.distributed.tensor import DTensor

from shardscope._torch.autograd import (
    current_node,
    is_in_backward,
    next_sequence_number,
    node_origin,
)
from shardscope._torch.dispatch import TorchDispatchMode, is_higher_order
from shardscope._torch.frames import Role
from shardscope.comm.calls import ModuleCalls
from shardscope.comm.names import NO_MODULE
from shardscope.comm.stack import read_stack
from shardscope.record import Source
from shardscope.shard.signature import Signature, freeze_call

__all__ = ["NOT_THE_MODELS", "Capture", "Recorder", "Use"]

# What moves tensors between ranks, asks about them or makes them wait is no op of the model's.
NOT_THE_MODELS = (
    "prim",
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "_dtensor",
    "fsdp",
)
_NO_PLACE: tuple[int, Source | None] = (NO_MODULE, None)

Place = tuple[int, Source | None]  # a module, as an index of its name, and a line


@dataclass
class Use:
    """How often a call is made from where, forwards and backwards."""

    forward: Counter[Place] = field(default_factory=Counter)
    backward: Counter[Place] = field(default_factory=Counter)

    @property
    def num_calls(self) -> int:
        """All of them."""
        return self.forward.total() + self.backward.total()

    @property
    def places(self) -> Counter[Place]:
        """Where it is called from, in either direction."""
        return self.forward + self.backward

    def add(self, other: Use, times: int = 1) -> None:
        """Count what `other` counts too, so many times over."""
        for own, others in ((self.forward, other.forward), (self.backward, other.backward)):
            for place, count in others.items():
                own[place] += count * times


Capture = dict[Signature, Use]


@final
class Recorder(TorchDispatchMode):
    """Counts the calls of ops that pass it, in a forward and the backward that follows.

    `run` is how an op is called; it may go on where the op would raise.
    """

    def __init__(self, calls: ModuleCalls, run: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.captured: Capture = {}
        self._calls = calls
        self._run = run
        self._makers: dict[int, Place] = {}  # who made the autograd node with this number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note the call, and make it."""
        kwargs = kwargs or {}
        if not is_higher_order(func) and func.namespace not in NOT_THE_MODELS:
            self._note(func, args, kwargs)
        return func(*args, **kwargs) if self._run is None else self._run(func, args, kwargs)

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_backward = is_in_backward()
        running = self._calls.running()
        if is_backward and running == NO_MODULE:
            place = self._place_of_node()
            if place is None:  # gradients are only put where they belong
                return
        else:  # also what checkpointing runs again
            stack = read_stack(sys._getframe(2))
            is_moving = Role.REDISTRIBUTE in stack.held or stack.asked_by is not None
            if is_moving and not _has_dtensor(args):
                return
            place = (running, stack.source)
            self._makers.setdefault(next_sequence_number() - 1, place)
        signature = freeze_call(func, args, kwargs)
        use = self.captured.get(signature)
        if use is None:
            use = self.captured[signature] = Use()
        (use.backward if is_backward else use.forward)[place] += 1

    def _place_of_node(self) -> Place | None:
        node = current_node()
        origin = None if node is None else node_origin(node)
        if isinstance(origin, torch.Tensor):
            return None
        return _NO_PLACE if origin is None else self._makers.get(origin, _NO_PLACE)


def _has_dtensor(values: Any) -> bool:
    return any(
        isinstance(value, DTensor) or (isinstance(value, list | tuple) and _has_dtensor(value))
        for value in values
    )
