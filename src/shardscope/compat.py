"""PyTorch's own names and signatures, for people who change one import."""

from __future__ import annotations

from shardscope.comm.debug.mode import CommDebugMode
from shardscope.shard.simple_profiler import SimpleProfiler

__all__ = ["CommDebugMode", "SimpleProfiler"]
