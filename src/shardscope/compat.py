"""PyTorch's own names and signatures, for people who change one import."""

from __future__ import annotations

from shardscope.comm.debug.mode import CommDebugMode
from shardscope.shard.op_summary import get_inductor_decomp_graphs, print_op_coverage_summary

__all__ = ["CommDebugMode", "get_inductor_decomp_graphs", "print_op_coverage_summary"]
