"""Records a step of a torchtitan run, with one option on its command line.

    --override.imports 'shardscope.plugins.torchtitan.record_step={"step": 10}'

torchtitan imports this module and calls `record_step` with its profiler's configuration: a profiler
is built where training begins. Scripts that make a `Trainer` themselves call `observe(trainer)`.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Unpack, cast, final

from shardscope.errors import PluginError
from shardscope.plugins.step_recorder import (
    RecorderOptions,
    StepRecorder,
    close_quietly,
    never_raise,
)
from shardscope.record import Gap

__all__ = ["TrainerObserver", "observe", "record_step"]

_CUDA_GRAPHS = (
    "forward and backward are replayed as a CUDA graph, whose collectives are not seen: record a "
    "run with --training.disable_cuda_graphs"
)


def record_step(config: Any, **options: Any) -> Any:
    """An override for torchtitan: its profiler's configuration, which also records a step.

    Args:
        config: A `Profiler.Config`, which torchtitan passes.
        **options: What `observe` takes, as a JSON object on the command line.

    Examples:
        >>> # torchrun … -m torchtitan.train … --override.imports \\
        >>> #     'shardscope.plugins.torchtitan.record_step={"step": 10, "num_steps": 2}'
    """
    StepRecorder(**{"step": 10, **options})  # refuse wrong options before the model is built
    return _make_config(config, options)


def observe(trainer: Any, *, step: int = 10, **options: Unpack[RecorderOptions]) -> TrainerObserver:
    """Record a step of a torchtitan `Trainer`, whose `train` is called afterwards.

    The recording is logged to the W&B run and the TensorBoard writer of the trainer.

    Args:
        trainer: The `Trainer`.
        step: The first step to record, counted from 1 as the trainer does.
        **options: `num_steps=1` to record; `memory=True` to observe memory, and
            `values=True` to sample values; `output`, by default `shardscope.json.gz` in the
            trainer's dump folder, and `force=True` to overwrite; `log=False` to keep it out of the
            trainer's loggers.

    Examples:
        >>> from shardscope.plugins.torchtitan import observe
        >>> trainer = config.build()
        >>> observe(trainer, step=10)
        >>> trainer.train()
    """
    if not all(hasattr(trainer, name) for name in ("train_step", "model_parts", "step")):
        raise PluginError(
            f"observe() got {type(trainer).__name__}, which is not a torchtitan Trainer. Give it "
            "what config.build() returns."
        )
    if "output" not in options:
        folder = Path(trainer.config.dump_folder)
        folder.mkdir(parents=True, exist_ok=True)
        options["output"] = folder / "shardscope.json.gz"
    return TrainerObserver(trainer, StepRecorder(step, **options))


@final
class TrainerObserver:
    """Wraps a trainer's `train_step` until the step is recorded; what `observe` returns."""

    def __init__(self, trainer: Any, recorder: StepRecorder) -> None:
        self.recorder = recorder
        self._trainer = weakref.ref(trainer)
        self._call = trainer.train_step
        weakref.finalize(trainer, close_quietly, recorder)
        self._begin(trainer)

    def __repr__(self) -> str:
        return f"TrainerObserver(step={self.recorder.step})"

    @never_raise
    def close(self) -> None:
        """Stop observing when training has ended, and join the recordings of all ranks."""
        trainer = self._trainer()
        self.recorder.close()
        if trainer is not None:
            self._restore(trainer)
            self.recorder.warn_if_missed(trainer.step)

    @never_raise
    def _begin(self, trainer: Any) -> None:
        self.recorder.prepare()
        trainer.train_step = self._run_step

    def _run_step(self, *args: Any, **kwargs: Any) -> Any:
        self._before_step()
        try:
            result = self._call(*args, **kwargs)
        except BaseException as error:
            self._abandon(error)
            raise
        self._after_step()
        return result

    @never_raise
    def _before_step(self) -> None:
        trainer = self._trainer()
        assert trainer is not None
        if self.recorder.wants(trainer.step - 1):
            parts = trainer.model_parts
            self.recorder.loggers = _list_loggers(trainer)
            self.recorder.resume(parts[0] if len(parts) == 1 else list(parts))

    @never_raise
    def _after_step(self) -> None:
        trainer = self._trainer()
        assert trainer is not None
        if self.recorder.is_recording:
            self.recorder.end_step(trainer.step, *_find_gaps(trainer))
        if self.recorder.is_done:
            self._restore(trainer)

    @never_raise
    def _abandon(self, error: BaseException) -> None:
        self.recorder.abandon(error)

    def _restore(self, trainer: Any) -> None:
        if vars(trainer).get("train_step") == self._run_step:
            del trainer.train_step


def _list_loggers(trainer: Any) -> list[Any]:
    container = getattr(getattr(trainer, "metrics_processor", None), "logger", None)
    return list(getattr(container, "_loggers", [container]))


def _find_gaps(trainer: Any) -> list[Gap]:
    """What a trace does not see of a step."""
    is_replayed = not getattr(trainer.config.training, "disable_cuda_graphs", True)
    if is_replayed and trainer.device.type == "cuda":
        return [Gap(place="collectives", fact=_CUDA_GRAPHS, is_loss=True)]
    return []


def _make_config(config: Any, options: dict[str, Any]) -> Any:
    """A configuration with the fields of `config` that builds a profiler which also observes."""
    profiler_class = import_module("torchtitan.tools.profiler").Profiler

    @final
    class ObservingProfiler(profiler_class):  # type: ignore[misc, valid-type]
        """A profiler that observes the trainer which builds it."""

        @dataclass(kw_only=True, slots=True)
        class Config(profiler_class.Config):  # type: ignore[misc, name-defined]
            observe_options: dict[str, Any] = field(default_factory=dict)

        def __enter__(self) -> Any:
            trainer = _find_trainer()
            self._observer = None if trainer is None else observe(trainer, **options)
            return super().__enter__()

        def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
            if self._observer is not None:
                self._observer.close()
            return cast(bool, super().__exit__(kind, error, traceback))

    derive = import_module("torchtitan.config.override").derive
    return derive(config, ObservingProfiler.Config, observe_options=options)


def _find_trainer() -> Any:
    """The trainer that enters its profiler, from the stack: profilers do not receive it."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        owner = frame.f_locals.get("self")
        if hasattr(owner, "train_step") and hasattr(owner, "model_parts"):
            return owner
    return None


if "torchtitan" in sys.modules:  # it imports this module to find the override
    import_module("torchtitan.config.override").override(
        target=import_module("torchtitan.tools.profiler").Profiler.Config,
        description="record a step with shardscope",
    )(record_step)
