"""Logs recordings with a `SummaryWriter` of torch or tensorboardX: metrics, and tables as text."""

from __future__ import annotations

from typing import Any

from shardscope.record import Recording
from shardscope.report.export.markdown import render_markdown
from shardscope.report.export.metrics import list_scalars

__all__ = ["log"]


def log(recording: Recording, writer: Any, *, step: int = 0, prefix: str = "shardscope") -> None:
    """Log a recording's metrics as scalars, and its findings and costs as Markdown.

    Args:
        recording: The recording.
        writer: A `torch.utils.tensorboard.SummaryWriter` or one of tensorboardX.
        step: The optimizer step that was recorded.
        prefix: What the tags begin with.

    Examples:
        >>> from shardscope.plugins import tensorboard as shardscope_tensorboard
        >>> shardscope_tensorboard.log(load("step.json.gz"), SummaryWriter("runs"), step=10)
    """
    for name, value in list_scalars(recording).items():
        writer.add_scalar(f"{prefix}/{name}", value, step)
    writer.add_text(f"{prefix}/summary", render_markdown(recording), step)
