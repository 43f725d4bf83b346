"""Counts the training steps of a program that does not know that it is observed, and ends it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final
from unittest import mock

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardscope._torch.autograd import watched_backwards
from shardscope._torch.module_calls import watch_module_calls
from shardscope._torch.process_groups.launched import watched_schedules


class StepsDone(BaseException):
    """Ends the program. Not an Exception, so that `except Exception` does not stop it."""


@final
class StepCounter:
    """Counts steps: an optimizer has stepped, and the model is called again or the program ends.

    Several optimizers that step between two calls of the model count as one step, and so does an
    optimizer that calls the model itself, by a closure. A program that has made no optimizer
    updates its parameters itself: there, each backward counts as a step.

    After the last step StepsDone is raised, so that the program's `finally` and `with` blocks run.
    If the program catches it and calls the model again, `on_refusal` is called, which ends it.
    """

    def __init__(
        self,
        limit: int,
        *,
        on_start: Callable[[list[nn.Module]], None],
        on_step: Callable[[], None],
        on_refusal: Callable[[], None],
    ) -> None:
        self.num_steps = 0
        self.has_started = False
        self.is_done = False  # the program was told to end
        self.ends_at_once = False  # instead of raising StepsDone
        self.num_backwards = 0  # that counted as steps
        self.num_calls = 0  # of models
        self._limit = limit
        self._on_start = on_start
        self._on_step = on_step
        self._on_refusal = on_refusal
        self._depth = threading.local()
        self._has_stepped = False
        self._has_optimizer = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe modules and optimizers until the context ends."""
        hook = register_optimizer_step_post_hook(self._end_optimizer)
        try:
            with (
                watch_module_calls(self),
                watched_schedules(self._enter, self._leave),
                watched_backwards(self._end_backward),
                _noted_optimizers(self._note_optimizer),
            ):
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
        self.num_calls += 1
        if self.is_done:
            self._on_refusal()
        if self._has_stepped:
            self._count()
            if self.num_steps >= self._limit:
                self.is_done = True
                if self.ends_at_once:
                    self._on_refusal()
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

    def _end_backward(self) -> None:
        if self.has_started and not self._has_optimizer:
            self._has_stepped = True
            self.num_backwards += 1

    def _note_optimizer(self) -> None:
        self._has_optimizer = True


def _is_trained(module: nn.Module) -> bool:
    return module.training and any(p.requires_grad for p in module.parameters())


@contextmanager
def _noted_optimizers(on_optimizer: Callable[[], None]) -> Iterator[None]:
    """Call `on_optimizer` when the program makes an optimizer of torch's or of a subclass."""
    make = Optimizer.__init__

    @functools.wraps(make)
    def make_and_note(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        on_optimizer()
        make(self, *args, **kwargs)

    with mock.patch.object(Optimizer, "__init__", make_and_note):
        yield
