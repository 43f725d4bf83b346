"""See what a PyTorch model does when it is compiled and sharded.

The entire public API is here. Names load when first used: reading a recording needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardscope.checks.api import CheckResult, check
    from shardscope.comm.trace import Trace as Trace
    from shardscope.comm.trace import trace as trace
    from shardscope.comm.value_selection import ValueSamples as ValueSamples
    from shardscope.compile.diagnose.diagnose import Diagnosed as Diagnosed
    from shardscope.compile.diagnose.diagnose import diagnose as diagnose
    from shardscope.compile.explain.explain import explain as explain
    from shardscope.compile.explain.explain import explaining
    from shardscope.errors import ShardscopeError as ShardscopeError
    from shardscope.hang.explain import explain_hang
    from shardscope.launch.api import RunResult, run
    from shardscope.parallel.api import parallelize
    from shardscope.parallel.inferred_types.api import infer_types
    from shardscope.parallel.parity.api import parity
    from shardscope.parallel.program import ParallelProgram as ParallelProgram
    from shardscope.record import Recording as Recording
    from shardscope.record import load as load
    from shardscope.record import merge
    from shardscope.record import save as save
    from shardscope.report.show import compare_runs as compare_runs
    from shardscope.report.show import diff as diff
    from shardscope.report.show import show as show
    from shardscope.shard.audit.audit import audit
    from shardscope.shard.audit.slices import visualize_sharding
    from shardscope.shard.coverage.coverage import coverage
    from shardscope.shard.memory.memory import Memory, memory
    from shardscope.shard.phases.phases import phases
    from shardscope.version import __version__ as __version__
    from shardscope.world import World as World
    from shardscope.world import simulate

_HOMES = {
    "CheckResult": "shardscope.checks.api",
    "Diagnosed": "shardscope.compile.diagnose.diagnose",
    "Memory": "shardscope.shard.memory.memory",
    "ParallelProgram": "shardscope.parallel.program",
    "Recording": "shardscope.record",
    "RunResult": "shardscope.launch.api",
    "ShardscopeError": "shardscope.errors",
    "Trace": "shardscope.comm.trace",
    "ValueSamples": "shardscope.comm.value_selection",
    "World": "shardscope.world",
    "__version__": "shardscope.version",
    "audit": "shardscope.shard.audit.audit",
    "check": "shardscope.checks.api",
    "compare_runs": "shardscope.report.show",
    "coverage": "shardscope.shard.coverage.coverage",
    "diagnose": "shardscope.compile.diagnose.diagnose",
    "diff": "shardscope.report.show",
    "explain": "shardscope.compile.explain.explain",
    "explain_hang": "shardscope.hang.explain",
    "explaining": "shardscope.compile.explain.explain",
    "infer_types": "shardscope.parallel.inferred_types.api",
    "load": "shardscope.record",
    "memory": "shardscope.shard.memory.memory",
    "merge": "shardscope.record",
    "parallelize": "shardscope.parallel.api",
    "parity": "shardscope.parallel.parity.api",
    "phases": "shardscope.shard.phases.phases",
    "run": "shardscope.launch.api",
    "save": "shardscope.record",
    "show": "shardscope.report.show",
    "simulate": "shardscope.world",
    "trace": "shardscope.comm.trace",
    "visualize_sharding": "shardscope.shard.audit.slices",
}

__all__ = [
    "CheckResult",
    "Diagnosed",
    "Memory",
    "ParallelProgram",
    "Recording",
    "RunResult",
    "ShardscopeError",
    "Trace",
    "ValueSamples",
    "World",
    "__version__",
    "audit",
    "check",
    "compare_runs",
    "coverage",
    "diagnose",
    "diff",
    "explain",
    "explain_hang",
    "explaining",
    "infer_types",
    "load",
    "memory",
    "merge",
    "parallelize",
    "parity",
    "phases",
    "run",
    "save",
    "show",
    "simulate",
    "trace",
    "visualize_sharding",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardscope' has no attribute {name!r}")
    import random

    # Some packages draw random numbers when they are imported: the user's go on as they were.
    state = random.getstate()
    try:
        value = getattr(import_module(_HOMES[name]), name)
    finally:
        random.setstate(state)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext shardscope`: adds the magics `%%shardscope` and `%shardscope`."""
    import_module("shardscope.plugins.notebook").register(shell)
