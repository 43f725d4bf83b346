"""Counts the training steps of a program that does not know that it is observed, and ends it."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NoReturn, final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardscope._torch.module_calls import watch_module_calls
from shardscope._torch.process_groups.host_data import watched_writes
from shardscope._torch.process_groups.launched import watched_schedules


class StepsDone(BaseException):
    """Ends the program. Not an Exception, so that `except Exception` does not stop it."""


class EndOfRun(BaseException):
    """Ends a program that waits, or whose run was interrupted. Not an Exception, as StepsDone."""


@final
class StepCounter:
    """Counts steps: the optimizers have stepped, and a model is called again or the program ends.

    A step contains one step of each optimizer, as those of a generator and its discriminator, or
    of Muon and AdamW. If an optimizer steps twice before others do, these do not count. A closure
    by which an optimizer calls the model belongs to the optimizer's step. A program without
    optimizers steps when it writes to its parameters outside the model.

    The first call of a model that is trained starts the first step. Calls by the constructor of a
    module, which find out shapes, do not. If the model is wrapped, sharded or extended after a call
    without backward, the first step starts again. Lazy layers get their shapes before.

    After the last step StepsDone is raised, so that the program's `finally` and `with` blocks run.
    If the program catches it and calls the model again, `on_refusal` is called, which ends it.
    """

    def __init__(
        self,
        limit: int,
        *,
        on_start: Callable[[list[nn.Module]], None],
        on_step: Callable[[], None],
        on_refusal: Callable[[], None] = lambda: None,
    ) -> None:
        self.num_steps = 0
        self.num_calls = 0  # of models
        self.has_started = False
        self.is_done = False  # the program was asked to end
        self._limit = limit
        self._on_start = on_start
        self._on_step = on_step
        self._on_refusal = on_refusal
        self._depth = threading.local()
        self._process = os.getpid()
        self._thread = threading.get_ident()  # the one that trains
        self._has_stepped = False
        self._num_in_optimizer = 0
        self._stepped: set[int] = set()  # parameters that were updated in this step, by id
        self._idle: set[int] = set()  # optimizers that do not step in each step, by id
        self._known: set[tuple[int, type]] = set()  # modules and parameters at the start, by id
        self._writes = ExitStack()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe modules and optimizers until the context ends."""
        hooks = [
            register_optimizer_step_pre_hook(self._begin_optimizer),
            register_optimizer_step_post_hook(self._end_optimizer),
        ]
        try:
            with (
                self._writes,
                watch_module_calls(self),
                watched_schedules(self._enter, self._leave),
            ):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def enter(self, module: nn.Module) -> None:
        """Called when a module is called; raises StepsDone after the last step."""
        self._enter([module])

    def exit(self, module: nn.Module) -> None:
        """Called when a module's call ends."""
        self._leave()

    def end(self) -> NoReturn:
        """Ask the program to end."""
        self.is_done = True
        raise StepsDone

    def finish(self) -> None:
        """Count the last step of a program that has ended by itself."""
        if self._has_stepped:
            self._count()

    def _enter(self, modules: list[nn.Module]) -> None:
        depth = getattr(self._depth, "value", 0)
        if depth == 0 and os.getpid() == self._process:  # else in a worker of a data loader
            self._begin_outermost(modules)
        self._depth.value = depth + 1

    def _leave(self) -> None:
        self._depth.value = getattr(self._depth, "value", 1) - 1

    def _begin_outermost(self, modules: list[nn.Module]) -> None:
        self.num_calls += 1
        if self.is_done:
            self._on_refusal()
        is_training = torch.is_grad_enabled() and any(map(_is_trained, modules))
        if is_training and self._is_rebuilt(modules):
            self._start(modules)
        is_next = self._has_stepped and not self._num_in_optimizer
        if is_next and threading.get_ident() == self._thread and not self._find_pending():
            self._count()
            self._end_if_done()
        if is_training and not self.has_started and not _is_in_constructor():
            self._start(modules)

    def _is_rebuilt(self, models: list[nn.Module]) -> bool:
        """Whether these models have got modules or parameters since the start, and no gradients."""
        if not self.has_started or self.num_steps or self._stepped:
            return False
        return not self._known.issuperset(_identify(models)) and not any(
            parameter.grad is not None for model in models for parameter in model.parameters()
        )

    def _start(self, modules: list[nn.Module]) -> None:
        self.has_started = True
        self._has_stepped = False
        self._known = {
            (id(value), type(value))
            for module in _find_objects(nn.Module)
            for value in (module, *module.parameters(recurse=False))
        }
        self._writes.close()
        self._on_start(modules)
        if not any(True for _ in _find_objects(Optimizer)):
            parameters = (p for module in _find_objects(nn.Module) for p in module.parameters())
            writes = watched_writes(filter(_requires_grad, parameters), self._note_write)
            self._writes.enter_context(writes)

    def _find_pending(self) -> list[Any]:
        """The optimizers of the program's models that have not stepped in this step."""
        if not self._find_waiting():
            return []
        gc.collect()  # models and optimizers that the program has dropped
        trained = {
            id(parameter)
            for module in _find_objects(nn.Module)
            for parameter in module.parameters()
            if parameter.requires_grad
        }
        return [
            optimizer for optimizer in self._find_waiting() if trained & _parameter_ids(optimizer)
        ]

    def _find_waiting(self) -> list[Any]:
        return [
            optimizer
            for optimizer in _find_objects(Optimizer)
            if id(optimizer) not in self._idle and not self._stepped & _parameter_ids(optimizer)
        ]

    def _count(self) -> None:
        self._has_stepped = False
        self._stepped.clear()
        self.num_steps += 1
        self._on_step()

    def _end_if_done(self) -> None:
        if self.num_steps >= self._limit:
            self.end()

    def _begin_optimizer(self, optimizer: Any, *_: Any) -> None:
        if not self._num_in_optimizer and self._stepped & _parameter_ids(optimizer):
            self._idle.update(map(id, self._find_pending()))
            if not self.has_started:  # what is trained is no module: observe the steps that follow
                self._has_stepped = False
                self._stepped.clear()
                self._start([])
            else:
                self._count()
                self._end_if_done()
        self._num_in_optimizer += 1

    def _end_optimizer(self, optimizer: Any, *_: Any) -> None:
        self._num_in_optimizer = max(0, self._num_in_optimizer - 1)
        self._has_stepped = True
        self._thread = threading.get_ident()
        self._stepped |= _parameter_ids(optimizer)

    def _note_write(self) -> None:
        if not getattr(self._depth, "value", 0):
            self._has_stepped = True


def _find_objects(kind: type[Any]) -> Iterator[Any]:
    # By the type: a weak proxy claims to be an instance of what it refers to.
    return (value for value in gc.get_objects() if issubclass(type(value), kind))


def _parameter_ids(optimizer: Any) -> set[int]:
    try:
        groups: Iterable[Any] = optimizer.param_groups
    except AttributeError:  # a wrapper that has not been given its optimizer
        return set()
    return {id(parameter) for group in groups for parameter in group["params"]}


def _identify(models: list[nn.Module]) -> Iterator[tuple[int, type]]:
    """Each module and parameter by its id and class, which `fully_shard` changes.

    FSDP replaces parameters in each step, and so does `torch.func.functional_call`: these are left
    out.
    """
    for model in models:
        modules = list(model.modules())
        yield from ((id(module), type(module)) for module in modules)
        if not any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in modules):
            for parameter in model.parameters():
                if isinstance(parameter, nn.Parameter):
                    yield id(parameter), type(parameter)


def _is_in_constructor() -> bool:
    """Whether the constructor of a module is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__init__":
            names = frame.f_code.co_varnames
            if names and isinstance(frame.f_locals.get(names[0]), nn.Module):
                return True
        frame = frame.f_back
    return False


def _is_trained(module: nn.Module) -> bool:
    if isinstance(module, ParametrizationList):  # called when the weight of a layer is read
        return False
    parameters = list(module.parameters())
    is_lazy = any(isinstance(parameter, UninitializedParameter) for parameter in parameters)
    return module.training and not is_lazy and any(map(_requires_grad, parameters))


def _requires_grad(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad


OnCall = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


@final
class ModelCall:
    """The arguments of the next call of a model, which is about to happen.

    `on_call` is called with the model and them before the call.
    """

    def __init__(self, model: nn.Module, on_call: OnCall = lambda *_: None) -> None:
        self.model = model
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self._on_call = on_call
        self._hook = model.register_forward_pre_hook(self._note, prepend=True, with_kwargs=True)

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self._hook.remove()
        self._on_call(module, args, kwargs)
