"""The phase of the step, the module and the source line that are responsible, at any moment."""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardscope._torch.autograd import (
    current_node,
    find_recomputed,
    is_in_backward,
    next_sequence_number,
    node_origin,
)
from shardscope._torch.ddp import Bucket
from shardscope._torch.frames import is_optimizer_running
from shardscope._torch.module_calls import watch_module_calls
from shardscope.attribution.call_sites import find_backward_caller, read_stack
from shardscope.attribution.module_calls import BucketRegistry, ModuleCalls
from shardscope.attribution.module_names import NO_MODULE, ModuleNames
from shardscope.record import Phase, Source
from shardscope.shard.memory.allocations import PhaseAndModule


@final
class LineTracker:
    """Finds the line of the user's program that an op belongs to, in forward and in backward.

    An op of backward belongs to the line of forward whose gradient it computes: autograd numbers
    its nodes as they are created, and each op of forward notes the number that was reached.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._numbers: list[int] = []  # of autograd nodes, ascending
        self._lines: list[Source | None] = []  # whose op created these nodes and those after them

    def note_op(self) -> None:
        """Note the line of an op that is run now, if autograd has created a node for it."""
        if not torch.is_grad_enabled() or threading.get_ident() != self._thread:
            return
        number = next_sequence_number() - 1
        if not self._numbers or number > self._numbers[-1]:
            self._numbers.append(number)
            self._lines.append(read_stack(sys._getframe(1)).source)

    def read(self) -> Source | None:
        """The line that the running op belongs to; in backward without one, the caller's."""
        if is_in_backward() and not torch.is_grad_enabled():
            line = self._find_forward()
            if line is not None:
                return line
        stack = read_stack(sys._getframe(1))
        if stack.user is None and is_in_backward():
            find_backward_caller(stack)
        return stack.source

    def _find_forward(self) -> Source | None:
        node = current_node()
        origin = None if node is None else node_origin(node)
        if not isinstance(origin, int):
            return None  # a gradient that is accumulated belongs to no line
        index = bisect_right(self._numbers, origin) - 1
        return self._lines[index] if index >= 0 else None


@final
class PhaseTracker:
    """Tracks the phase of the step and the module that is running on this thread."""

    def __init__(self, names: ModuleNames) -> None:
        self.lines = LineTracker()
        self._names = names
        self._buckets = BucketRegistry(names, _ignore)
        self._calls = ModuleCalls(names, self._buckets, _ignore)
        self._thread = threading.get_ident()
        self._num_optimizers = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow modules and optimizers until the context ends."""
        hooks = (
            register_optimizer_step_pre_hook(self._enter_optimizer),
            register_optimizer_step_post_hook(self._exit_optimizer),
        )
        try:
            with self._calls.marking_threads(), watch_module_calls(self._calls):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def read(self) -> PhaseAndModule:
        """The current phase and module."""
        if self._num_optimizers:
            if is_optimizer_running(sys._getframe()):
                return PhaseAndModule(Phase.OPTIMIZER, NO_MODULE)
            self._num_optimizers = 0  # it raised, so its post hook did not run
        if not is_in_backward():
            module = self._calls.running()
            return PhaseAndModule(Phase.OUTSIDE if module == NO_MODULE else Phase.FORWARD, module)
        if torch.is_grad_enabled():  # backward needs no gradients; recomputation does
            module = self._calls.running()
            if module != NO_MODULE:
                return PhaseAndModule(Phase.RECOMPUTE, module)
            if find_recomputed(sys._getframe()) is not None:
                return PhaseAndModule(Phase.RECOMPUTE, self._calls.recomputing())
        return PhaseAndModule(Phase.BACKWARD, self._find_maker())

    def find_bucket(self, num_elements: int) -> Bucket | None:
        """The bucket of `num_elements` elements that DDP is reducing now, or None."""
        if not self._names.has_data_parallel or not is_in_backward():
            return None
        node = current_node()
        origin = None if node is None else node_origin(node)
        if node is not None and not isinstance(origin, torch.Tensor):
            return None  # a collective of the user's
        last = origin if isinstance(origin, torch.Tensor) else None
        return self._buckets.find_bucket(num_elements, last)

    def _find_maker(self) -> int:
        node = current_node()
        if node is None:
            return NO_MODULE
        origin = node_origin(node)
        if isinstance(origin, torch.Tensor):
            return self._names.owner_of(origin)
        is_here = threading.get_ident() == self._thread
        reached = next_sequence_number() if is_here else None
        creator = self._calls.creator_of(origin, self._thread, reached=reached)
        return NO_MODULE if creator is None else creator

    def _enter_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._num_optimizers += 1

    def _exit_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._num_optimizers = max(0, self._num_optimizers - 1)


def _ignore(place: str, fact: str) -> None:
    """Ignore gaps: a node's module may be unknown, and then its bytes belong to no module."""
