"""A Hugging Face `TrainerCallback` that records one step.

`transformers` is not imported before a callback is created. Its trainer does not notify callbacks
when training raises, so the methods that it calls during the step are wrapped to observe errors.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, update_wrapper
from typing import Any, Self, Unpack, final

from shardscope.plugins.step_recorder import (
    RecorderOptions,
    StepRecorder,
    close_quietly,
    make_callback,
    never_raise,
)

__all__ = ["ShardscopeCallback"]

ErrorHandler = Callable[[BaseException], None]

_MODULES = ("transformers",)


@final
class ShardscopeCallback:
    """Records an optimizer step, from forward to optimizer.

    Steps are counted from 1, as in the trainer's logs: it is the step after which
    `state.global_step` is `step`, with all of its accumulated batches. Each rank writes a file:
    `{rank}` in `output` becomes the rank, which is appended if there are several ranks.

    Args:
        step: The first step to record, counted from 1.
        **options: `num_steps=1` to record; `memory=True` to observe memory, and
            `values=True` to sample values;
            `output="shardscope.json.gz"`, and `force=True` to overwrite; `log=False` to keep it
            out of the trainer's experiment trackers.

    Examples:
        >>> from shardscope.plugins.transformers import ShardscopeCallback
        >>> trainer = Trainer(model, callbacks=[ShardscopeCallback(step=10, output="step.json.gz")])
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return make_callback(cls, _MODULES, "TrainerCallback", package="Hugging Face transformers")

    def __init__(self, step: int = 10, **options: Unpack[RecorderOptions]) -> None:
        self.recorder = StepRecorder(step, **options)
        self._recreate = partial(ShardscopeCallback, step, **options)
        self._guards = ExitStack()
        weakref.finalize(self, close_quietly, self.recorder)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._recreate, ()

    @never_raise
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that the file can be written; write what an earlier training left unfinished."""
        self._stop()
        self.recorder.close()
        self.recorder.prepare()

    @never_raise
    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Begin to record if this is the step."""
        if self.recorder.wants(state.global_step):
            trainer = _find_trainer()
            if trainer is not None:
                callbacks = trainer.callback_handler.callbacks
                # The runs of its loggers for W&B and MLflow are active in this process.
                self.recorder.loggers = [
                    entry for entry in callbacks if hasattr(entry, "tb_writer")
                ]
                self._guards.enter_context(_observe_step_errors(trainer, self._on_error))
            self.recorder.resume(model)

    @never_raise
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop recording, and write the step."""
        self._guards.close()
        self.recorder.end_step(state.global_step)

    @never_raise
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pause if a step was started and then skipped."""
        self._stop()

    @never_raise
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Warn if training did not reach the step."""
        self._stop()
        self.recorder.close()
        self.recorder.warn_if_missed(state.global_step)

    @never_raise
    def _on_error(self, error: BaseException) -> None:
        self._guards.close()
        self.recorder.abandon(error)

    def _stop(self) -> None:
        self._guards.close()
        self.recorder.pause()


@contextmanager
def _observe_step_errors(trainer: Any, handler: ErrorHandler) -> Iterator[None]:
    """Call `handler` with each exception of the step, until the context ends."""
    with ExitStack() as stack:
        stack.enter_context(_observe_errors(trainer, "training_step", handler))
        stack.enter_context(_observe_errors(trainer.accelerator, "clip_grad_norm_", handler))
        stack.enter_context(_observe_errors(trainer.optimizer, "step", handler))
        yield


def _find_trainer() -> Any:
    """The calling trainer, from the stack: callbacks do not receive it."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        owner = frame.f_locals.get("self")
        if hasattr(owner, "training_step") and hasattr(owner, "callback_handler"):
            return owner
    return None


@contextmanager
def _observe_errors(owner: Any, name: str, handler: ErrorHandler) -> Iterator[None]:
    """Call `handler` with what the method raises; the last context to end restores the method."""
    method = vars(owner).get(name)
    if not isinstance(method, _ObservedMethod):
        method = _ObservedMethod(owner, name)
        setattr(owner, name, method)
    method.handlers.append(handler)
    try:
        yield
    finally:
        method.handlers.remove(handler)
        if not method.handlers:
            method.restore()


@final
class _ObservedMethod:
    """Wraps a method of an object, and passes its exceptions to handlers."""

    def __init__(self, owner: Any, name: str) -> None:
        self.handlers: list[ErrorHandler] = []
        self._owner, self._name = owner, name
        self._call = getattr(owner, name)
        self._before = vars(owner).get(name)
        update_wrapper(
            self, self._call
        )  # learning-rate schedulers look for attributes that they set on it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._call(*args, **kwargs)
        except BaseException as error:
            for handler in tuple(self.handlers):
                handler(error)
            raise

    def restore(self) -> None:
        """Restore the original method, unless it was replaced again in the meantime."""
        if vars(self._owner).get(self._name) is not self:
            return
        if self._before is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)
