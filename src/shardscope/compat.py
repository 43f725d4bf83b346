"""PyTorch's own names and signatures, for people who change one import."""

from __future__ import annotations

from shardscope.comm.debug.mode import CommDebugMode

__all__ = ["CommDebugMode"]
