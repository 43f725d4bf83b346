"""Ranks and meshes without a cluster: simulated worlds of any size, and threaded ranks."""

from shardscope.world.simulate import World, current_world, simulate

__all__ = ["World", "current_world", "simulate"]
