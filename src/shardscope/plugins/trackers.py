"""Logs a recording to the experiment tracker that a training run uses; never raises into the run.

`wandb.py`, `mlflow.py` and `tensorboard.py` log to one package each; `find_active_trackers` and
`find_trackers` find the runs that are active in the process, and those of a trainer.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

from shardscope.record import Recording, sanitize_text


class Tracker(NamedTuple):
    """An experiment tracker: its package, and what logs a recording of a step of this number."""

    package: str
    log: Callable[[Recording, int], None]


def warn(sentence: str) -> None:
    """Issue a warning that never raises, whatever warning filters the program has."""
    sentence = sanitize_text(sentence)
    try:
        warnings.warn(f"shardscope: {sentence}", stacklevel=3)
    except Warning:
        print(f"shardscope: {sentence}", file=sys.stderr)


def log_everywhere(loggers: Iterable[Any], recording: Recording, step: int) -> None:
    """Log to the trackers of `loggers` and of this process; an error of one is a warning."""
    try:
        trackers = find_trackers(loggers)
    except Exception as error:  # noqa: BLE001 - a tracker must not end the training
        _warn_not_logged(error, step)
        return
    for tracker in trackers:
        try:
            tracker.log(recording, step)
        except Exception as error:  # noqa: BLE001 - and the others still log
            _warn_not_logged(error, step)


def _warn_not_logged(error: Exception, step: int) -> None:
    reason = str(error) or type(error).__name__
    warn(f"step {step} is not in the experiment tracker; training continues: {reason}")


def find_active_trackers() -> Iterator[Tracker]:
    """The trackers whose run is active in this process: `wandb.run` and `mlflow.active_run()`."""
    wandb = sys.modules.get("wandb")
    if getattr(wandb, "run", None) is not None:
        yield make_wandb_tracker(wandb.run)  # type: ignore[union-attr]
    mlflow = sys.modules.get("mlflow")
    active = None if mlflow is None else mlflow.active_run()
    if active is not None:
        yield make_mlflow_tracker(active.info.run_id)


def find_trackers(loggers: Iterable[Any]) -> list[Tracker]:
    """The trackers behind a trainer's loggers, and those that are active in this process.

    Args:
        loggers: Lightning's loggers, callbacks of Hugging Face's trainer that log, or Accelerate's
            trackers.
    """
    trackers = list(find_active_trackers())
    active = {tracker.package for tracker in trackers}
    for logger in loggers:
        tracker = _find_tracker(logger)
        if tracker is not None and tracker.package not in active:
            trackers.append(tracker)
    return trackers


def _find_tracker(logger: Any) -> Tracker | None:
    """The tracker of a logger, by the name of its class; None for loggers of other kinds."""
    match type(logger).__name__:
        case "WandbLogger":
            return make_wandb_tracker(logger.experiment)
        case "MLFlowLogger":
            return make_mlflow_tracker(logger.run_id, client=logger.experiment)
        case "TensorBoardLogger" if hasattr(logger, "writer"):  # torchtitan's
            return make_tensorboard_tracker(logger.writer)
        case "TensorBoardLogger":
            return make_tensorboard_tracker(logger.experiment)
        case "TensorBoardCallback" if logger.tb_writer is not None:
            return make_tensorboard_tracker(logger.tb_writer)
        case "TensorBoardTracker":
            return make_tensorboard_tracker(logger.tracker)
        case "WandBTracker":
            return make_wandb_tracker(logger.tracker)
    return None


def make_wandb_tracker(run: Any) -> Tracker:
    """A tracker that logs to a W&B run."""

    def log(recording: Recording, step: int) -> None:
        import_module("shardscope.plugins.wandb").log(recording, run=run, step=step)

    return Tracker("wandb", log)


def make_mlflow_tracker(run_id: str, *, client: Any = None) -> Tracker:
    """A tracker that logs to an MLflow run."""

    def log(recording: Recording, step: int) -> None:
        module = import_module("shardscope.plugins.mlflow")
        module.log(recording, run_id=run_id, client=client, step=step)

    return Tracker("mlflow", log)


def make_tensorboard_tracker(writer: Any) -> Tracker:
    """A tracker that logs with a `SummaryWriter`."""

    def log(recording: Recording, step: int) -> None:
        import_module("shardscope.plugins.tensorboard").log(recording, writer, step=step)

    return Tracker("tensorboard", log)
