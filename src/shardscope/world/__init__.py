"""WHERE IT RUNS: ranks and meshes, of a real process group or of a simulated one of any size."""

from shardscope.world.simulate import World, current_world, simulate

__all__ = ["World", "current_world", "simulate"]
