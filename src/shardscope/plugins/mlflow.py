"""Logs recordings to MLflow: metrics, tags, tables, the recording and its page.

The package `mlflow` (or `mlflow-skinny`) is imported when something is logged.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shardscope.errors import PluginError
from shardscope.record import Recording, count_ranks, save
from shardscope.record.arrow import import_package
from shardscope.report.export.csv import disarm, write_rows
from shardscope.report.export.metrics import list_scalars, list_tables
from shardscope.report.html.html import render_html

__all__ = ["log"]

_FORBIDDEN = re.compile(r"[^\w\-. /:]", re.ASCII)  # in the names of metrics
_MAX_BATCH = 900  # metrics; the server refuses more than 1,000 in a request


def log(
    recording: Recording,
    *,
    run_id: str | None = None,
    step: int = 0,
    client: Any = None,
    prefix: str = "shardscope",
) -> None:
    """Log a recording to an MLflow run.

    Metrics have the names of the TensorBoard export; characters that MLflow forbids become `_`.
    Tags say what was recorded. The folder `<prefix>` of the run's artifacts gets the recording,
    the page and a CSV file for each table.

    Args:
        recording: The recording.
        run_id: The run; by default the active one.
        step: The optimizer step that was recorded.
        client: A `MlflowClient`; by default one for the current tracking URI.
        prefix: What the names of metrics and tags begin with.

    Examples:
        >>> from shardscope.plugins import mlflow as shardscope_mlflow
        >>> shardscope_mlflow.log(load("step.json.gz"), step=10)
    """
    mlflow = import_package("mlflow", "shardscope.plugins.mlflow.log()", package="mlflow-skinny")
    if run_id is None:
        active = mlflow.active_run()
        if active is None:
            raise PluginError(
                "shardscope.plugins.mlflow.log() has no run to log to: none is active in this "
                "process. Call mlflow.start_run() before, or pass run_id=."
            )
        run_id = active.info.run_id
    client = mlflow.MlflowClient() if client is None else client
    now = int(time.time() * 1000)
    metrics = [
        mlflow.entities.Metric(_FORBIDDEN.sub("_", f"{prefix}/{name}"), value, now, step)
        for name, value in list_scalars(recording).items()
    ]
    tags = [mlflow.entities.RunTag(f"{prefix}.{key}", text) for key, text in _list_tags(recording)]
    for start in range(0, len(metrics), _MAX_BATCH):
        client.log_batch(run_id, metrics=metrics[start : start + _MAX_BATCH])
    client.log_batch(run_id, tags=tags)
    with TemporaryDirectory() as folder:
        _write_artifacts(recording, Path(folder))
        client.log_artifacts(run_id, folder, artifact_path=prefix)


def _list_tags(recording: Recording) -> list[tuple[str, str]]:
    run = recording.run
    return [
        ("version", run.shardscope_version),
        ("torch", run.torch_version),
        ("instruments", "+".join(run.instruments)),
        ("mesh", " × ".join(f"{axis.name}={axis.size}" for axis in run.axes) or "none"),
        ("ranks", f"{count_ranks(run.ranks)} of {run.world_size}"),
        ("simulated", str(run.is_simulated).lower()),
    ]


def _write_artifacts(recording: Recording, folder: Path) -> None:
    save(recording, folder / "recording.json.gz")
    (folder / "report.html").write_text(render_html(recording), encoding="utf-8")
    for name, table in list_tables(recording).items():
        rows = [[*map(str, row)] for row in (table.columns, *table.rows)]
        (folder / f"{name}.csv").write_bytes(write_rows([*map(disarm, row)] for row in rows))
