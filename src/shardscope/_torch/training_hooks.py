"""Reports what a training step does outside its modules: backward, clipping, optimizer steps.

Of ranks that are threads, collectives are reported, too.

Functions that clip gradients may have been imported by name before they are watched. They share a
wrapper of torch, whose variable with the wrapped function is exchanged, so that all names of a
function are watched.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CellType
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardscope._torch.private import find_name, is_missing

_NEED = "compare gradients before and after they are clipped"
_get_total_norm = find_name("torch.nn.utils.clip_grad._get_total_norm", _NEED)
_clip_with_norm = find_name("torch.nn.utils.clip_grad._clip_grads_with_norm_", _NEED)
_READS = ("item", "tolist", "__float__", "__int__")


class TrainingListener:
    """Called on the thread that watches; subclasses have what they need. Must not raise."""

    def before_backward(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Backward is about to start at these tensors."""

    def after_backward(self) -> None:
        """Backward has ended."""

    def before_clipping(self) -> None:
        """The norm of gradients is about to be computed, or gradients are about to be clipped."""

    def clip(self, norm: torch.Tensor) -> None:
        """Gradients are about to be scaled by the limit over this norm."""

    def before_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""

    def decide(self, number: float) -> None:
        """A scheduler is about to decide by a number whether the learning rate changes."""

    def read(self, tensor: torch.Tensor, value: object) -> None:
        """The program reads the value of a tensor, as with `item()`."""

    def after_collective(
        self, kind: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        """A collective, or a receive, of a threaded rank has filled its outputs."""


_listeners: dict[int, list[TrainingListener]] = {}  # by thread
_readers: list[TrainingListener] = []  # those that `read` is called of
_installed = ExitStack()
_reads_installed = ExitStack()
_lock = threading.Lock()
_state = threading.local()


@contextmanager
def watch_training(listener: TrainingListener, *, has_reads: bool = True) -> Iterator[None]:
    """Report what a training step does on this thread until the context ends.

    Without `has_reads`, reads of values are reported only if another listener wants them.
    """
    thread = threading.get_ident()
    with _lock:
        if not _listeners:
            _install()
        if has_reads:
            _add_reader(listener)
        _listeners.setdefault(thread, []).append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners[thread].remove(listener)
            if not _listeners[thread]:
                del _listeners[thread]
            if has_reads:
                _remove_reader(listener)
            if not _listeners:
                _installed.close()


def _add_reader(listener: TrainingListener) -> None:
    if not _readers:
        for name in _READS:
            _exchange_method(name)
    _readers.append(listener)


def _remove_reader(listener: TrainingListener) -> None:
    _readers.remove(listener)
    if not _readers:
        _reads_installed.close()


@contextmanager
def unwatched() -> Iterator[None]:
    """Report nothing on this thread until the context ends, as for code of our own."""
    is_outer = getattr(_state, "is_unwatched", False)
    _state.is_unwatched = True
    try:
        yield
    finally:
        _state.is_unwatched = is_outer


def _report(call: Callable[[TrainingListener], None]) -> None:
    listeners = _listeners.get(threading.get_ident(), ())
    if not listeners or getattr(_state, "is_unwatched", False):
        return
    with unwatched():
        for listener in tuple(listeners):
            call(listener)


def report_collective(
    kind: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> None:
    """Tell the listeners of this thread that a collective has filled its outputs."""
    _report(lambda listener: listener.after_collective(kind, inputs, outputs))


def _install() -> None:
    hooks = (
        register_optimizer_step_pre_hook(
            lambda optimizer, *_: _report(lambda listener: listener.before_optimizer(optimizer))
        ),
        register_optimizer_step_post_hook(
            lambda optimizer, *_: _report(lambda listener: listener.after_optimizer(optimizer))
        ),
    )
    for hook in hooks:
        _installed.callback(hook.remove)
    _exchange(torch.autograd, "backward", _watch_backward)
    _exchange(ReduceLROnPlateau, "step", _watch_decision)
    begin = _precede(lambda listener: listener.before_clipping())
    for function in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_):
        _exchange_wrapped(function, begin)
    _exchange_wrapped(_get_total_norm, begin)
    _exchange_wrapped(_clip_with_norm, _watch_clipping)


def _exchange(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    _installed.callback(setattr, owner, name, original)


def _exchange_method(name: str) -> None:
    """Watch a method that torch.Tensor inherits, and that reads the value of a tensor."""
    is_own = name in vars(torch.Tensor)
    original = getattr(torch.Tensor, name)

    @functools.wraps(original)
    def read(tensor: torch.Tensor) -> object:
        value = original(tensor)
        _report(lambda listener: listener.read(tensor, value))
        return value

    setattr(torch.Tensor, name, read)
    if is_own:
        _reads_installed.callback(setattr, torch.Tensor, name, original)
    else:
        _reads_installed.callback(delattr, torch.Tensor, name)


def _exchange_wrapped(function: Any, wrap: Callable[[Any], Any]) -> None:
    """Replace the function that a wrapper of torch calls, whichever name it is called by."""
    cell = None if is_missing(function) else find_wrapped(function)
    if cell is not None:
        original = cell.cell_contents
        cell.cell_contents = wrap(original)
        _installed.callback(setattr, cell, "cell_contents", original)


def find_wrapped(function: Any) -> CellType | None:
    """The variable of a wrapper that holds the function it wraps; None if it has no such."""
    cells: tuple[CellType, ...] = getattr(function, "__closure__", None) or ()
    return next((cell for cell in cells if callable(cell.cell_contents)), None)


def _precede(report: Callable[[TrainingListener], None]) -> Callable[[Any], Any]:
    def wrap(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            _report(report)
            return function(*args, **kwargs)

        return call

    return wrap


def _watch_clipping(function: Any) -> Any:
    @functools.wraps(function)
    def clip(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        _report(lambda listener: listener.before_clipping())
        _report(lambda listener: listener.clip(total_norm))
        return function(parameters, max_norm, total_norm, *args, **kwargs)

    return clip


def _watch_backward(function: Any) -> Any:
    @functools.wraps(function)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        started = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        _report(lambda listener: listener.before_backward(started))
        result = function(tensors, *args, **kwargs)
        _report(lambda listener: listener.after_backward())
        return result

    return backward


def _watch_decision(function: Any) -> Any:
    @functools.wraps(function)
    def step(scheduler: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
        _report(lambda listener: listener.decide(float(metrics)))
        return function(scheduler, metrics, *args, **kwargs)

    return step
