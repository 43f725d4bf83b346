"""The passes of the partitioner, in the order in which `parallelize` uses them.

`capture` exports a model, `from_export` makes the program functional and reads it into a
`ShardingGraph`. `propagate` assigns placements along one mesh axis and inserts reshards: it chooses
among the `strategies` of each op by the `cost_model`. `schedule` lists the collectives of each rank
and checks that they match, `grad_reduction` finds which gradients need one. `lower` writes
the FX graph of one rank, with `reshard` and `collectives`; `exported` makes an ExportedProgram of
it, `backward` a joint graph, and `memory_use` measures either.
"""

from shardscope.parallel.passes.backward import JointGraph
from shardscope.parallel.passes.capture import Capture, WithLoss, export_model, export_with_loss
from shardscope.parallel.passes.from_export import make_functional, read_program
from shardscope.parallel.passes.grad_reduction import Gradients
from shardscope.parallel.passes.lower import RankProgram
from shardscope.parallel.passes.propagate import AxisConstraints, Fallback, propagate_axis
from shardscope.parallel.passes.schedule import (
    ScheduledCollective,
    check_order,
    group_ranks_by_shapes,
    trace_collectives,
)

__all__ = [
    "AxisConstraints",
    "Capture",
    "Fallback",
    "Gradients",
    "JointGraph",
    "RankProgram",
    "ScheduledCollective",
    "WithLoss",
    "check_order",
    "export_model",
    "export_with_loss",
    "group_ranks_by_shapes",
    "make_functional",
    "propagate_axis",
    "read_program",
    "trace_collectives",
]
