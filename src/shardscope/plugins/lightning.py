"""A PyTorch Lightning callback that records one step.

Works with `lightning` and with `pytorch_lightning`; neither is imported before a callback is made.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, Self, Unpack, final

from shardscope.plugins.step_recorder import (
    RecorderOptions,
    StepRecorder,
    close_quietly,
    make_callback,
    never_raise,
)

__all__ = ["ShardscopeCallback"]

_MODULES = ("lightning.pytorch", "pytorch_lightning")


@final
class ShardscopeCallback:
    """Records an optimizer step, from forward to optimizer.

    Steps are counted from 1: it is the step after which `trainer.global_step` is `step`, with all
    of its accumulated batches and without validation. Each rank writes a file: `{rank}` in `output`
    becomes the rank, which is appended if there are several ranks.

    Args:
        step: The first step to record, counted from 1.
        **options: `num_steps=1` to record; `memory=True` to observe memory, and
            `values=True` to sample values;
            `output="shardscope.json.gz"`, and `force=True` to overwrite; `log=False` to keep it
            out of the trainer's experiment trackers.

    Examples:
        >>> from shardscope.plugins.lightning import ShardscopeCallback
        >>> trainer = Trainer(callbacks=[ShardscopeCallback(step=10, output="step.json.gz")])
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return make_callback(cls, _MODULES, "Callback", package="PyTorch Lightning")

    def __init__(self, step: int = 10, **options: Unpack[RecorderOptions]) -> None:
        self.recorder = StepRecorder(step, **options)
        self._num_done = 0
        self._num_stepped = 0  # by the last batch that stepped any optimizer
        # For processes that Lightning spawns, which create it again.
        self._recreate = partial(ShardscopeCallback, step, **options)
        weakref.finalize(self, close_quietly, self.recorder)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._recreate, ()

    @never_raise
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check that the file can be written."""
        self.recorder.prepare()

    @never_raise
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: object, batch_idx: int
    ) -> None:
        """Begin or continue recording if this batch belongs to the step."""
        self._num_done = trainer.global_step
        # Where optimizers are stepped by hand, Lightning counts the steps of all of them.
        is_automatic = pl_module.automatic_optimization
        num_next = 1 if is_automatic else self._num_stepped or len(trainer.optimizers)
        if self.recorder.wants(self._num_done, num_next=num_next):
            self.recorder.resume(pl_module)

    @never_raise
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Pause, and write the step if this was its last batch."""
        self.recorder.loggers = trainer.loggers
        self._num_stepped = trainer.global_step - self._num_done or self._num_stepped
        self.recorder.end_step(trainer.global_step)

    @never_raise
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Pause if a batch was started and then skipped."""
        self.recorder.pause()

    @never_raise
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Write what was recorded of the step."""
        self.recorder.abandon(exception)

    @never_raise
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Warn if training did not reach the step."""
        self.recorder.close()
        self.recorder.warn_if_missed(trainer.global_step)
