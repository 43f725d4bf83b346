"""Logs a recording to the experiment tracker that a training run uses; never raises into the run.

`wandb.py`, `mlflow.py` and `tensorboard.py` log to one package each; `find_active` and
`find_trackers` find the runs that are active in the process, and those of a trainer.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

from shardscope.errors import PluginError
from shardscope.record import Recording, sanitize_text


class Tracker(NamedTuple):
    """An experiment tracker: its package, and what logs a recording of a step of this number."""

    package: str
    log: Callable[[Recording, int], None]


_EXTRAS = {"mlflow": "mlflow-skinny"}


def import_package(name: str, *, asked_by: str) -> Any:
    """Import an optional package, or raise a sentence that says how to install it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise PluginError(
            f"{asked_by} needs the package {name}, which is not installed here. "
            f"Install it: pip install {_EXTRAS.get(name, name)}"
        ) from error


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
        _warn_of(error, step)
        return
    for tracker in trackers:
        try:
            tracker.log(recording, step)
        except Exception as error:  # noqa: BLE001 - and the others still log
            _warn_of(error, step)


def _warn_of(error: Exception, step: int) -> None:
    reason = str(error) or type(error).__name__
    warn(f"step {step} is not in the experiment tracker; training continues: {reason}")


def find_active() -> Iterator[Tracker]:
    """The trackers whose run is active in this process: `wandb.run` and `mlflow.active_run()`."""
    wandb = sys.modules.get("wandb")
    if getattr(wandb, "run", None) is not None:
        yield log_to_wandb(wandb.run)  # type: ignore[union-attr]
    mlflow = sys.modules.get("mlflow")
    active = None if mlflow is None else mlflow.active_run()
    if active is not None:
        yield log_to_mlflow(active.info.run_id)


def find_trackers(loggers: Iterable[Any]) -> list[Tracker]:
    """The trackers behind a trainer's loggers, and those that are active in this process.

    Args:
        loggers: Lightning's loggers, callbacks of Hugging Face's trainer that log, or Accelerate's
            trackers.
    """
    trackers = list(find_active())
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
            return log_to_wandb(logger.experiment)
        case "MLFlowLogger":
            return log_to_mlflow(logger.run_id, client=logger.experiment)
        case "TensorBoardLogger" if hasattr(logger, "writer"):  # torchtitan's
            return log_to_tensorboard(logger.writer)
        case "TensorBoardLogger":
            return log_to_tensorboard(logger.experiment)
        case "TensorBoardCallback" if logger.tb_writer is not None:
            return log_to_tensorboard(logger.tb_writer)
        case "TensorBoardTracker":
            return log_to_tensorboard(logger.tracker)
        case "WandBTracker":
            return log_to_wandb(logger.tracker)
    return None


def log_to_wandb(run: Any) -> Tracker:
    """A tracker that logs to a W&B run."""

    def log(recording: Recording, step: int) -> None:
        import_module("shardscope.plugins.wandb").log(recording, run=run, step=step)

    return Tracker("wandb", log)


def log_to_mlflow(run_id: str, *, client: Any = None) -> Tracker:
    """A tracker that logs to an MLflow run."""

    def log(recording: Recording, step: int) -> None:
        module = import_module("shardscope.plugins.mlflow")
        module.log(recording, run_id=run_id, client=client, step=step)

    return Tracker("mlflow", log)


def log_to_tensorboard(writer: Any) -> Tracker:
    """A tracker that logs with a `SummaryWriter`."""

    def log(recording: Recording, step: int) -> None:
        import_module("shardscope.plugins.tensorboard").log(recording, writer, step=step)

    return Tracker("tensorboard", log)
