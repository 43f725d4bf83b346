"""PyTorch's own names and signatures, for people who change one import."""

from __future__ import annotations

from torch import nn

from shardscope.comm.debug.mode import CommDebugMode
from shardscope.compile.explain.torch_names import ExplainOutput, ExplainWithBackend
from shardscope.parallel.tp_transform import tensor_parallel_transformation
from shardscope.report.sharded_tree import format_tree
from shardscope.shard.audit import audit
from shardscope.shard.groups import names_by_group
from shardscope.shard.op_summary import get_inductor_decomp_graphs, print_op_coverage_summary
from shardscope.shard.simple_profiler import SimpleProfiler

__all__ = [
    "CommDebugMode",
    "ExplainOutput",
    "ExplainWithBackend",
    "SimpleProfiler",
    "get_inductor_decomp_graphs",
    "get_sharded_module_tree_with_module_name_to_fqns",
    "print_op_coverage_summary",
    "tensor_parallel_transformation",
]


def get_sharded_module_tree_with_module_name_to_fqns(
    model: nn.Module,
) -> tuple[str, dict[str, list[str]]]:
    """The sharded module tree as text, and the names of the parameters of each FSDP group.

    Names and classes are the user's own, whichever FSDP wrapped them.
    """
    modules = audit(model).modules
    return format_tree(modules), names_by_group(modules)
