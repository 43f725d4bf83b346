"""Records optimizer steps of a training loop that is written by hand, with one line.

Accelerate's and Ray Train's hooks are based on it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Unpack, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardscope._torch.module_calls import watch_module_calls
from shardscope.errors import PluginError
from shardscope.plugins.step_recorder import (
    RecorderOptions,
    StepRecorder,
    never_raise,
)

__all__ = ["LoopObserver", "observe"]


def observe(
    model: nn.Module | Iterable[nn.Module],
    optimizer: Optimizer | Iterable[Optimizer],
    *,
    step: int = 10,
    **options: Unpack[RecorderOptions],
) -> LoopObserver:
    """Record a step of the training loop that follows.

    A step begins when the model is called in training mode and ends when each of the optimizers
    has stepped. In other steps only the optimizers' steps are counted, by a hook that is removed
    after the recorded one. Errors of ours are warnings, and training continues.

    Args:
        model: The model that the loop calls, as DDP or FSDP has wrapped it; or several.
        optimizer: Its optimizer, or several.
        step: The first step to record, counted from 1.
        **options: `num_steps=1` to record; `memory=True` to observe memory, and
            `values=True` to sample values;
            `output="shardscope.json.gz"`, and `force=True` to overwrite; `log=False` to keep it
            out of W&B and MLflow runs that are active.

    Examples:
        >>> from shardscope.plugins.training_loop import observe
        >>> observe(model, optimizer, step=10, output="step.json.gz")
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    _check(models, nn.Module, "model")
    _check(optimizers, Optimizer, "optimizer")
    return LoopObserver(models, optimizers, StepRecorder(step, **options))


def _check(values: list[Any], cls: type, name: str) -> None:
    wrong = next((type(value).__name__ for value in values if not isinstance(value, cls)), None)
    if wrong is not None or not values:
        raise PluginError(
            f"observe() got {wrong or 'nothing'} for its {name}. Give it the {name} of the "
            "training loop, or a list of them."
        )


@final
class LoopObserver:
    """Observes a training loop; what `observe` returns.

    It ends by itself. `close` ends it earlier, for example before the process group is destroyed,
    and joins the recordings of all ranks; so does leaving it as a context.
    """

    def __init__(
        self, models: list[nn.Module], optimizers: list[Optimizer], recorder: StepRecorder
    ) -> None:
        self.recorder = recorder
        self._models: list[nn.Module] = models
        self._optimizer_ids = {id(optimizer) for optimizer in optimizers}
        self._stepped: set[int] = set()
        self._num_done = 0
        self._handles: list[RemovableHandle] = []
        self._waiting = ExitStack()  # in which module calls are watched
        # Training is over when its optimizer is collected, or the process ends.
        self._finalizer = weakref.finalize(optimizers[0], self._end)
        self._begin(optimizers)

    def __repr__(self) -> str:
        return f"LoopObserver(step={self.recorder.step}, {self._num_done} done)"

    def __enter__(self) -> LoopObserver:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and self.recorder.is_recording:
            self._abandon(error)
        self.close()

    @never_raise
    def close(self) -> None:
        """Stop observing; warn if the step was not reached."""
        self._finalizer.detach()
        self._end()

    @never_raise
    def _end(self) -> None:
        self._stop()
        self.recorder.close()
        self.recorder.warn_if_missed(self._num_done)

    @never_raise
    def _abandon(self, error: BaseException) -> None:
        self.recorder.abandon(error)

    @never_raise
    def _begin(self, optimizers: list[Optimizer]) -> None:
        self.recorder.prepare()
        self._handles = [
            optimizer.register_step_post_hook(self._on_step) for optimizer in optimizers
        ]
        self._wait_for_forward()

    @never_raise
    def _on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Count the step when every optimizer has stepped, and prepare for the next."""
        self._stepped.add(id(optimizer))
        if self._stepped != self._optimizer_ids:
            return
        self._stepped.clear()
        self._num_done += 1
        self.recorder.note_optimizer(optimizer)
        self.recorder.end_step(self._num_done)
        if self.recorder.is_done:
            self._stop()
        else:
            self._wait_for_forward()

    def _wait_for_forward(self) -> None:
        """Begin with the next call of a model, if the next step is to be recorded."""
        if self.recorder.wants(self._num_done):
            self._waiting.close()
            self._waiting.enter_context(watch_module_calls(_CallWatcher(self)))

    @never_raise
    def on_call(self, module: nn.Module) -> None:
        """Begin to record if this is the first call of a model in training."""
        is_training = module.training and torch.is_grad_enabled()
        if is_training and any(module is model for model in self._models):
            try:
                self.recorder.resume(self._name_models())
            finally:
                self._waiting.close()

    def _name_models(self) -> Any:
        return self._models[0] if len(self._models) == 1 else self._models

    def _stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._waiting.close()
        self._models = []


@final
class _CallWatcher:
    """Reports module calls to an observer; a trace that it starts sees the call, too."""

    def __init__(self, observer: LoopObserver) -> None:
        self._observer = observer

    def enter(self, module: nn.Module) -> None:
        """A module is called."""
        self._observer.on_call(module)

    def exit(self, module: nn.Module) -> None:
        """Calls may end unnoticed."""
