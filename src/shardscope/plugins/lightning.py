"""A PyTorch Lightning callback that records one step.

Works with `lightning` and with `pytorch_lightning`; neither is imported before a callback is made.
"""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path
from typing import Any, Self, final

from shardscope.plugins.guest import close_quietly, harmless, make_guest
from shardscope.plugins.step_recorder import StepRecorder

__all__ = ["ShardscopeCallback"]

_HOMES = ("lightning.pytorch", "pytorch_lightning")


@final
class ShardscopeCallback:
    """Records one optimizer step, from forward to optimizer.

    Steps are counted from 1: it is the step after which `trainer.global_step` is `step`, with all
    of its accumulated batches and without validation. Each rank writes a file: `{rank}` in `output`
    becomes the rank, which is appended if there are several ranks.

    Examples:
        >>> from shardscope.plugins.lightning import ShardscopeCallback
        >>> trainer = Trainer(callbacks=[ShardscopeCallback(step=10, output="step.json.gz")])
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return make_guest(cls, _HOMES, "Callback", package="PyTorch Lightning")

    def __init__(
        self, step: int = 10, *, output: str | Path = "shardscope.json.gz", force: bool = False
    ) -> None:
        self.recorder = StepRecorder(step, output, force=force)
        self._num_done = 0
        self._num_stepped = 0  # by the last batch that stepped any optimizer
        # For processes that Lightning spawns, which begin anew.
        self._again = partial(ShardscopeCallback, step, output=output, force=force)
        weakref.finalize(self, close_quietly, self.recorder)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._again, ()

    @harmless
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Look whether the file can be written."""
        self.recorder.prepare()

    @harmless
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: object, batch_idx: int
    ) -> None:
        """Begin, or go on, if this batch is one of the step's."""
        self._num_done = trainer.global_step
        # Where optimizers are stepped by hand, Lightning counts the steps of all of them.
        is_automatic = pl_module.automatic_optimization
        num_next = 1 if is_automatic else self._num_stepped or len(trainer.optimizers)
        if self.recorder.wants(self._num_done, num_next=num_next):
            self.recorder.resume(pl_module)

    @harmless
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Stop, and write the step if this was its last batch."""
        self.recorder.pause()
        self._num_stepped = trainer.global_step - self._num_done or self._num_stepped
        if trainer.global_step >= self.recorder.step:
            self.recorder.finish()

    @harmless
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop where a batch was begun and then skipped."""
        self.recorder.pause()

    @harmless
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Write the step as far as it came."""
        self.recorder.abandon(exception)

    @harmless
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Say so if training did not come by the step."""
        self.recorder.close()
        self.recorder.tell_missed(trainer.global_step)
