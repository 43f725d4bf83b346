"""Where the step is at this moment: its phase, and the module that is answerable."""

from __future__ import annotations

import sys
import threading
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
    is_in_backward,
    next_sequence_number,
    node_origin,
)
from shardscope._torch.ddp import Bucket
from shardscope._torch.module_calls import watch_module_calls
from shardscope._torch.recompute import find_recomputed
from shardscope._torch.running import is_optimizer_running
from shardscope.comm.buckets import BucketBook
from shardscope.comm.calls import ModuleCalls
from shardscope.comm.names import NO_MODULE, ModuleNames
from shardscope.record import Phase
from shardscope.shard.ledger import Place

__all__ = ["Places"]


@final
class Places:
    """Knows the phase and module of whatever happens on this thread."""

    def __init__(self, names: ModuleNames) -> None:
        self._names = names
        self._buckets = BucketBook(names, _ignore)
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
            with self._calls.watching(), watch_module_calls(self._calls):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def read(self) -> Place:
        """The place of what happens now."""
        if self._num_optimizers:
            if is_optimizer_running(sys._getframe()):
                return Place(Phase.OPTIMIZER, NO_MODULE)
            self._num_optimizers = 0  # it raised, and has not said that it ended
        if not is_in_backward():
            module = self._calls.running()
            return Place(Phase.OUTSIDE if module == NO_MODULE else Phase.FORWARD, module)
        if torch.is_grad_enabled():  # backward needs no gradients; what is run again for it does
            module = self._calls.running()
            if module != NO_MODULE:
                return Place(Phase.RECOMPUTE, module)
            if find_recomputed(sys._getframe()) is not None:
                return Place(Phase.RECOMPUTE, self._calls.recomputing())
        return Place(Phase.BACKWARD, self._find_maker())

    def find_bucket(self, num_elements: int) -> Bucket | None:
        """The bucket that DDP reduces now, if it does and the bucket has so many elements."""
        if not self._names.has_data_parallel or not is_in_backward():
            return None
        node = current_node()
        origin = None if node is None else node_origin(node)
        if node is not None and not isinstance(origin, torch.Tensor):
            return None  # a collective of the program's own
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
        maker = self._calls.maker_of(origin, self._thread, reached=reached)
        return NO_MODULE if maker is None else maker

    def _enter_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._num_optimizers += 1

    def _exit_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._num_optimizers = max(0, self._num_optimizers - 1)


def _ignore(place: str, fact: str) -> None:
    """Who made a node may be unknown; then its bytes are no module's, and that shows."""
