"""Making it parallel: plan, propagate, partition, parity, on exported programs.

Names load when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardscope.parallel.api import parallelize
    from shardscope.parallel.program import ParallelProgram
    from shardscope.plan.placements import Partial, Replicate, Shard
    from shardscope.plan.plan import Plan
    from shardscope.plan.styles import (
        Colwise,
        ModuleInput,
        ModuleOutput,
        Replicated,
        Rowwise,
        Sequence,
    )

_HOMES = {
    "Colwise": "shardscope.plan.styles",
    "ModuleInput": "shardscope.plan.styles",
    "ModuleOutput": "shardscope.plan.styles",
    "ParallelProgram": "shardscope.parallel.program",
    "Partial": "shardscope.plan.placements",
    "Plan": "shardscope.plan.plan",
    "Replicate": "shardscope.plan.placements",
    "Replicated": "shardscope.plan.styles",
    "Rowwise": "shardscope.plan.styles",
    "Sequence": "shardscope.plan.styles",
    "Shard": "shardscope.plan.placements",
    "parallelize": "shardscope.parallel.api",
}

__all__ = [
    "Colwise",
    "ModuleInput",
    "ModuleOutput",
    "ParallelProgram",
    "Partial",
    "Plan",
    "Replicate",
    "Replicated",
    "Rowwise",
    "Sequence",
    "Shard",
    "parallelize",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardscope.parallel' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
