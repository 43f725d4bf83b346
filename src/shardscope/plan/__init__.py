"""Plans as users write them: how each module, parameter, input and output is sharded.

A plan maps names and patterns of modules to styles (`Colwise()`, `"rowwise"`, torch's
`ColwiseParallel()`) or placements (`Shard(0)`). `Plan` reads all of these forms, and TOML files,
into entries; `PlanMatcher` finds the entries for a module or tensor. `audit` compares a model with
its plan; `parallelize` resolves the plan to placements (`shardscope.parallel.plan`).
"""

from shardscope.plan.match import PlanMatcher
from shardscope.plan.parse import Entry, read_entry
from shardscope.plan.plan import Plan

__all__ = ["Entry", "Plan", "PlanMatcher", "read_entry"]
