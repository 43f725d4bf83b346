"""Torch's own logs that we write to in its place."""

from __future__ import annotations

__all__ = ["SIMPLE_PROFILER_LOG"]

SIMPLE_PROFILER_LOG = "torch.distributed.fsdp._debug_utils"
"""Where torch's SimpleProfiler writes its lines."""
