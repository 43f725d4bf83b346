"""Reads the counts of a `CommDebugMode`, by module."""

from __future__ import annotations

from typing import Any

import torch

from shardscope.compat import CommDebugMode

ALL_REDUCE = torch.ops.c10d_functional.all_reduce


def counts(mode: CommDebugMode, direction: str, key: Any = ALL_REDUCE) -> dict[str, int]:
    """How many collectives of a kind each module issued in a direction, if any."""
    return {
        name: passes[direction][key]
        for name, passes in mode.comm_module_counts.items()
        if key in passes[direction]
    }
