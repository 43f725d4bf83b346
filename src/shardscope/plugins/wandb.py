"""Logs recordings to Weights & Biases: metrics, tables, the page, and the recording as an artifact.

The package `wandb` is imported when something is logged.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shardscope.errors import PluginError
from shardscope.record import Recording, save
from shardscope.record.arrow import import_package
from shardscope.report.export.metrics import list_scalars, list_tables
from shardscope.report.html.html import render_html

__all__ = ["log"]


def log(
    recording: Recording, *, run: Any = None, step: int | None = None, prefix: str = "shardscope"
) -> None:
    """Log a recording to a W&B run, together with what the run logs next.

    The run's step counter does not change. Metrics have the names of the TensorBoard export,
    tables are the costliest causes, the memory at the peak and the findings; the page is a
    panel, and with the recording it is in an artifact of the type `shardscope`.

    Args:
        recording: The recording.
        run: The run; by default `wandb.run`, the active one.
        step: The optimizer step that was recorded, logged as `<prefix>/step`.
        prefix: What the names of metrics and tables begin with.

    Examples:
        >>> from shardscope.plugins import wandb as shardscope_wandb
        >>> shardscope_wandb.log(load("step.json.gz"), run=run, step=10)
    """
    wandb = import_package("wandb", "shardscope.plugins.wandb.log()", package="wandb")
    run = wandb.run if run is None else run
    if run is None:
        raise PluginError(
            "shardscope.plugins.wandb.log() has no run to log to: none is active in this process. "
            "Call wandb.init() before, or pass run=."
        )
    page = render_html(recording)
    values: dict[str, Any] = {
        f"{prefix}/{name}": value for name, value in list_scalars(recording).items()
    }
    for name, table in list_tables(recording).items():
        values[f"{prefix}/{name}"] = wandb.Table(
            columns=list(table.columns), data=[list(row) for row in table.rows]
        )
    values[f"{prefix}/page"] = wandb.Html(page, inject=False)
    if step is not None:
        values[f"{prefix}/step"] = step
    run.log(values, commit=False)  # a row of our own would advance the run's step
    _log_artifact(wandb, run, recording, page, name=f"{prefix}-{run.id}")


def _log_artifact(wandb: Any, run: Any, recording: Recording, page: str, *, name: str) -> None:
    artifact = wandb.Artifact(name, type="shardscope")
    with TemporaryDirectory() as folder:
        artifact.add_file(str(save(recording, Path(folder) / "recording.json.gz")))
        path = Path(folder) / "report.html"
        path.write_text(page, encoding="utf-8")
        artifact.add_file(str(path))
    run.log_artifact(artifact)
