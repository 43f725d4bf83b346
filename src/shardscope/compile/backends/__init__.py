"""Debugging backends for torch.compile, registered by name, and backends that inject faults.

Each runs a part of what Inductor does, so that the step that goes wrong can be found: the
captured graph, AOT autograd, decompositions, the partitioner. Fault backends break one op on
purpose, to test tools like `diagnose`.
"""

from __future__ import annotations

from shardscope.compile.backends.aot import (
    aot_eager,
    aot_eager_decomp_partition,
    aot_eager_decomp_partition_crossref,
    aot_eager_decomp_partition_with_mode,
    aot_eager_default_partitioner,
    invoke_subgraph,
)
from shardscope.compile.backends.faults import (
    InjectedFault,
    fault_accuracy_error,
    fault_compile_error,
    fault_crash,
    fault_hang,
    fault_nan,
    fault_non_leaf,
    fault_runtime_error,
)
from shardscope.compile.backends.graph_backends import (
    aot_ts,
    eager,
    eager_debug,
    eager_noexcept,
    eager_with_modes,
    pre_dispatch_eager,
    torchscript,
)

__all__ = [
    "InjectedFault",
    "aot_eager",
    "aot_eager_decomp_partition",
    "aot_eager_decomp_partition_crossref",
    "aot_eager_decomp_partition_with_mode",
    "aot_eager_default_partitioner",
    "aot_ts",
    "eager",
    "eager_debug",
    "eager_noexcept",
    "eager_with_modes",
    "fault_accuracy_error",
    "fault_compile_error",
    "fault_crash",
    "fault_hang",
    "fault_nan",
    "fault_non_leaf",
    "fault_runtime_error",
    "invoke_subgraph",
    "pre_dispatch_eager",
    "torchscript",
]
