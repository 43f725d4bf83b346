"""Making it parallel: plan, propagate, partition, parity, on exported programs.

Names load when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardscope.parallel.api import parallelize
    from shardscope.parallel.plan.plan import Plan as Plan
    from shardscope.parallel.plan.styles import Colwise as Colwise
    from shardscope.parallel.plan.styles import ModuleInput as ModuleInput
    from shardscope.parallel.plan.styles import ModuleOutput as ModuleOutput
    from shardscope.parallel.plan.styles import Replicated as Replicated
    from shardscope.parallel.plan.styles import Rowwise as Rowwise
    from shardscope.parallel.plan.styles import Sequence as Sequence
    from shardscope.parallel.program import ParallelProgram as ParallelProgram
    from shardscope.plan.placements import Partial, Replicate, Shard

_HOMES = {
    "Colwise": "shardscope.parallel.plan.styles",
    "ModuleInput": "shardscope.parallel.plan.styles",
    "ModuleOutput": "shardscope.parallel.plan.styles",
    "ParallelProgram": "shardscope.parallel.program",
    "Partial": "shardscope.plan.placements",
    "Plan": "shardscope.parallel.plan.plan",
    "Replicate": "shardscope.plan.placements",
    "Replicated": "shardscope.parallel.plan.styles",
    "Rowwise": "shardscope.parallel.plan.styles",
    "Sequence": "shardscope.parallel.plan.styles",
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
