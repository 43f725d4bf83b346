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
from shardscope._torch.propagation import op_handlers
from shardscope.comm.calls import ModuleCalls
from shardscope.comm.names import NO_MODULE
from shardscope.comm.stack import Stack, read_stack
from shardscope.record import Source
from shardscope.shard.signature import Signature, freeze_call

__all__ = ["NOT_THE_MODELS", "Capture", "Recorder", "Use"]

# What moves tensors between ranks, asks about them or makes them wait is no op of the model's.
NOT_THE_MODELS = (
    "prim",
    "profiler",
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
class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the calls of ops that pass it, in a forward and the backward that follows.

    Ops that take functions are run and reported: what is in them nobody judges.

    `run` is how an op is called; it may go on where the op would raise. `is_placed` says that the
    model lies on a mesh, so that some of what is called only moves it there.
    """

    supports_higher_order_operators = True  # torch would refuse to run them

    def __init__(
        self,
        calls: ModuleCalls,
        run: Callable[..., Any],
        report: Callable[[str, str], None],
        *,
        is_placed: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.captured: Capture = {}
        self.functional: set[str] = set()  # ops that take functions
        self.handlers: dict[Any, Any] = {}  # of ops that a context such as loss_parallel() runs
        self._usual_handlers = dict(op_handlers())
        self._calls = calls
        self._run = run
        self._report = report
        self._is_placed = is_placed
        self._makers: dict[int, Place] = {}  # who made the autograd node with this number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note the call, and make it."""
        kwargs = kwargs or {}
        if is_higher_order(func):
            self.functional.add(str(func))
            self._report(str(func), "it takes functions, whose ops were not tested")
            return func(*args, **kwargs)
        if func.namespace not in NOT_THE_MODELS:
            self._note(func, args, kwargs)
        return self._run(func, args, kwargs)

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_backward = is_in_backward()
        running = self._calls.running()
        if is_backward and running == NO_MODULE:
            place = self._place_of_node()
            # Gradients that are only put where they belong, or moved there, are no op's work.
            if place is None or (self._is_placed and _is_moving(args)):
                return
        else:  # also what checkpointing runs again
            stack = read_stack(sys._getframe(2))
            if self._is_placed and _is_moving(args, stack):
                return
            if stack.boundary is Role.OPTIMIZER:
                return
            place = (running, stack.source)
            self._makers.setdefault(next_sequence_number() - 1, place)
        handler = op_handlers().get(func)
        if handler is not None and handler is not self._usual_handlers.get(func):
            self.handlers[func] = handler
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


def _is_moving(args: tuple[Any, ...], stack: Stack | None = None) -> bool:
    """Whether a tensor of this rank's is on its way to another layout."""
    if _has_dtensor(args):
        return False
    stack = stack or read_stack(sys._getframe(3))
    return Role.REDISTRIBUTE in stack.held or stack.asked_by is not None


def _has_dtensor(values: Any) -> bool:
    return any(
        isinstance(value, DTensor) or (isinstance(value, list | tuple) and _has_dtensor(value))
        for value in values
    )
