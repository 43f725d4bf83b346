"""Gets the recording from an instrument's result."""

from __future__ import annotations

from typing import Any

from shardscope.record import Recording


def read_recording(result: Any, *, asked_by: str) -> Recording:
    """Return the recording itself, or that of a trace, an audit or a parallel program."""
    recording = result if isinstance(result, Recording) else getattr(result, "recording", None)
    if callable(recording):
        recording = recording()
    if not isinstance(recording, Recording):
        raise TypeError(
            f"{asked_by}() got {type(result).__name__}. Give it a recording, or what trace(), "
            "audit(), visualize_sharding() or parallelize() gives."
        )
    return recording
