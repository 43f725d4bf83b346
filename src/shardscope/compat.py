"""PyTorch's own names and signatures, for people who change one import."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardscope.comm.debug.mode import CommDebugMode
from shardscope.compile.backends.torch_api import (
    ReluCompileError,
    TestingOnlyCompileError,
    aot_eager,
    aot_eager_decomp_partition,
    aot_eager_decomp_partition_crossref,
    aot_eager_decomp_partition_with_mode,
    aot_eager_default_partitioner,
    aot_ts,
    boxed_nop,
    boxed_nop_with_mode,
    eager,
    eager_debug,
    eager_noexcept,
    fake_crossref_boxed_nop,
    get_nop_func,
    ignore_builtins,
    invoke_subgraph,
    make_eager_backend_with_torch_function_mode,
    make_eager_backend_with_torch_function_modes,
    non_leaf_compile_error_TESTING_ONLY,
    pre_dispatch_eager,
    relu_accuracy_error_TESTING_ONLY,
    relu_compile_error_TESTING_ONLY,
    relu_runtime_error_TESTING_ONLY,
    torchscript,
)
from shardscope.compile.explain.torch_api import ExplainOutput, ExplainWithBackend, explain
from shardscope.parallel.tp_transform import tensor_parallel_transformation
from shardscope.report.show import show
from shardscope.report.text.sharding import format_tree
from shardscope.shard.audit.audit import audit
from shardscope.shard.audit.sharded_tensors import names_by_group
from shardscope.shard.audit.slices import visualize_sharding as describe_sharding
from shardscope.shard.coverage.torch_summary import (
    get_inductor_decomp_graphs,
    print_op_coverage_summary,
)
from shardscope.shard.phases.phases import SimpleProfiler

__all__ = [
    "CommDebugMode",
    "ExplainOutput",
    "ExplainWithBackend",
    "ReluCompileError",
    "SimpleProfiler",
    "TestingOnlyCompileError",
    "aot_eager",
    "aot_eager_decomp_partition",
    "aot_eager_decomp_partition_crossref",
    "aot_eager_decomp_partition_with_mode",
    "aot_eager_default_partitioner",
    "aot_ts",
    "boxed_nop",
    "boxed_nop_with_mode",
    "eager",
    "eager_debug",
    "eager_noexcept",
    "explain",
    "fake_crossref_boxed_nop",
    "get_inductor_decomp_graphs",
    "get_nop_func",
    "get_sharded_module_tree_with_module_name_to_fqns",
    "ignore_builtins",
    "invoke_subgraph",
    "make_eager_backend_with_torch_function_mode",
    "make_eager_backend_with_torch_function_modes",
    "non_leaf_compile_error_TESTING_ONLY",
    "pre_dispatch_eager",
    "print_op_coverage_summary",
    "relu_accuracy_error_TESTING_ONLY",
    "relu_compile_error_TESTING_ONLY",
    "relu_runtime_error_TESTING_ONLY",
    "tensor_parallel_transformation",
    "torchscript",
    "visualize_sharding",
]


def get_sharded_module_tree_with_module_name_to_fqns(
    model: nn.Module,
) -> tuple[str, dict[str, list[str]]]:
    """The tree of sharded modules as text, and the names of the parameters of each FSDP group.

    Module names and classes are those of the unwrapped model, for FSDP1 and FSDP2.

    Args:
        model: The sharded model.

    Examples:
        >>> tree, names = get_sharded_module_tree_with_module_name_to_fqns(model)
    """
    modules = audit(model).modules
    return format_tree(modules), names_by_group(modules)


# As torch spells it, so that the import is the one line to change.
_get_sharded_module_tree_with_module_name_to_fqns = get_sharded_module_tree_with_module_name_to_fqns


def visualize_sharding(dtensor: Any, header: str = "", use_rich: bool = False) -> None:
    """Print which rank holds which slice of a DTensor, on the first rank of its mesh.

    Args:
        dtensor: The tensor.
        header: A title above the picture.
        use_rich: Accepted for torch's signature; colors depend on the terminal alone.

    Examples:
        >>> visualize_sharding(model.layers[0].weight, header="the first layer")
    """
    if dtensor.numel() == 0 or any(dtensor.device_mesh.get_coordinate() or [1]):
        return
    show(describe_sharding(dtensor, name=header))
