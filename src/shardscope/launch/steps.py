"""Counts the training steps of a program that does not know that it is observed, and ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardscope._torch.module_calls import watch_module_calls
from shardscope._torch.process_groups.launched import watched_schedules


class StepsDone(BaseException):
    """Ends the program. Not an Exception, so that `except Exception` does not stop it."""


@final
class StepCounter:
    """Counts steps: an optimizer has stepped, and the model is called again or the program ends.

    Several optimizers that step between two calls of the model count as one step, and so does an
    optimizer that calls the model itself, by a closure.
    """

    def __init__(
        self,
        limit: int,
        *,
        on_start: Callable[[list[nn.Module]], None],
        on_step: Callable[[], None],
    ) -> None:
        self.num_steps = 0
        self.has_started = False
        self._limit = limit
        self._on_start = on_start
        self._on_step = on_step
        self._depth = threading.local()
        self._has_stepped = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe modules and optimizers until the context ends."""
        hook = register_optimizer_step_post_hook(self._end_optimizer)
        try:
            with watch_module_calls(self), watched_schedules(self._enter, self._leave):
                yield
        finally:
            hook.remove()

    def enter(self, module: nn.Module) -> None:
        """Called when a module is called; raises StepsDone after the last step."""
        self._enter([module])

    def exit(self, module: nn.Module) -> None:
        """Called when a module's call ends."""
        self._leave()

    def finish(self) -> None:
        """Count the last step of a program that has ended by itself."""
        if self._has_stepped:
            self._count()

    def _enter(self, modules: list[nn.Module]) -> None:
        depth = getattr(self._depth, "value", 0)
        if depth == 0:
            self._begin_outermost(modules)
        self._depth.value = depth + 1

    def _leave(self) -> None:
        self._depth.value = getattr(self._depth, "value", 1) - 1

    def _begin_outermost(self, modules: list[nn.Module]) -> None:
        if self._has_stepped:
            self._count()
            if self.num_steps >= self._limit:
                raise StepsDone
        if not self.has_started and torch.is_grad_enabled() and any(map(_is_trained, modules)):
            self.has_started = True
            self._on_start(modules)

    def _count(self) -> None:
        self._has_stepped = False
        self.num_steps += 1
        self._on_step()

    def _end_optimizer(self, *_: Any) -> None:
        self._has_stepped = True


def _is_trained(module: nn.Module) -> bool:
    return module.training and any(p.requires_grad for p in module.parameters())
