"""Ranks and meshes without a cluster.

`simulate` makes this process one rank of a world of any size, in which nothing is sent; `checks`
refuses collectives that would hang or fail on real ranks, and `objects` has the object collectives.
`threaded_ranks` runs all ranks of a small mesh as threads of this process, with data.
"""

from shardscope.world.simulate import World, current_world, simulate

__all__ = ["World", "current_world", "simulate"]
