"""Resolves a plan against an exported program and a mesh, to placements by name.

`index_program` lists what a plan can name: modules, tensors, inputs and outputs. `resolve` finds
the placement of each, by the entries of the plan that match it. Plans as users write them are in
`shardscope.plan`.
"""

from shardscope.parallel.plan.program_index import index_program
from shardscope.parallel.plan.resolve import PlacementConstraint, ResolvedPlan, resolve

__all__ = [
    "PlacementConstraint",
    "ResolvedPlan",
    "index_program",
    "resolve",
]
