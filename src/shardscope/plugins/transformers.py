"""A Hugging Face `TrainerCallback` that records one step.

`transformers` is not imported before a callback is made. Its trainer tells callbacks nothing when
training raises, so that what it calls during the step is watched for that.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any, Self, final

from shardscope.plugins.guest import close_quietly, harmless, make_guest
from shardscope.plugins.step_recorder import StepRecorder

__all__ = ["ShardscopeCallback"]

Hearer = Callable[[BaseException], None]

_HOMES = ("transformers",)


@final
class ShardscopeCallback:
    """Records one optimizer step, from forward to optimizer.

    Steps are counted from 1, as in the trainer's logs: it is the step after which
    `state.global_step` is `step`, with all of its accumulated batches. Each rank writes a file:
    `{rank}` in `output` becomes the rank, which is appended if there are several ranks.

    Examples:
        >>> from shardscope.plugins.transformers import ShardscopeCallback
        >>> trainer = Trainer(model, callbacks=[ShardscopeCallback(step=10, output="step.json.gz")])
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return make_guest(cls, _HOMES, "TrainerCallback", package="Hugging Face transformers")

    def __init__(
        self, step: int = 10, *, output: str | Path = "shardscope.json.gz", force: bool = False
    ) -> None:
        self.recorder = StepRecorder(step, output, force=force)
        self._again = partial(ShardscopeCallback, step, output=output, force=force)
        self._guards = ExitStack()
        weakref.finalize(self, close_quietly, self.recorder)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._again, ()

    @harmless
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look whether the file can be written; an earlier training may have ended unheard."""
        self._stop()
        self.recorder.close()
        self.recorder.prepare()

    @harmless
    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Begin if it is the step."""
        if self.recorder.wants(state.global_step):
            self._guards.enter_context(_raising_told(self._hear_error))
            self.recorder.resume(model)

    @harmless
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop, and write the step."""
        self._stop()
        self.recorder.finish()

    @harmless
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop where a step was begun and then skipped."""
        self._stop()

    @harmless
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say so if training did not come by the step."""
        self._stop()
        self.recorder.close()
        self.recorder.tell_missed(state.global_step)

    @harmless
    def _hear_error(self, error: BaseException) -> None:
        self._guards.close()
        self.recorder.abandon(error)

    def _stop(self) -> None:
        self._guards.close()
        self.recorder.pause()


@contextmanager
def _raising_told(hear: Hearer) -> Iterator[None]:
    """Tell of what the step raises, until the context ends."""
    trainer = _find_trainer()
    with ExitStack() as stack:
        if trainer is not None:
            stack.enter_context(_listening(trainer, "training_step", hear))
            stack.enter_context(_listening(trainer.accelerator, "clip_grad_norm_", hear))
            stack.enter_context(_listening(trainer.optimizer, "step", hear))
        yield


def _find_trainer() -> Any:
    """The trainer that is calling us: callbacks are given all but it."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        owner = frame.f_locals.get("self")
        if hasattr(owner, "training_step") and hasattr(owner, "callback_handler"):
            return owner
    return None


@contextmanager
def _listening(owner: Any, name: str, hear: Hearer) -> Iterator[None]:
    """Hear what the object's method raises; the object is as before when the last has left."""
    method = vars(owner).get(name)
    if not isinstance(method, _Overheard):
        method = _Overheard(owner, name)
        setattr(owner, name, method)
    method.hearers.append(hear)
    try:
        yield
    finally:
        method.hearers.remove(hear)
        if not method.hearers:
            method.restore()


@final
class _Overheard:
    """A method of one object in whose place it tells what it raises."""

    def __init__(self, owner: Any, name: str) -> None:
        self.hearers: list[Hearer] = []
        self._owner, self._name = owner, name
        self._call = getattr(owner, name)
        self._before = vars(owner).get(name)
        update_wrapper(self, self._call)  # schedulers look for marks that they left on it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._call(*args, **kwargs)
        except BaseException as error:
            for hear in tuple(self.hearers):
                hear(error)
            raise

    def restore(self) -> None:
        """Take it out again, unless somebody has put another in its place."""
        if vars(self._owner).get(self._name) is not self:
            return
        if self._before is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)
