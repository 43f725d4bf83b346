"""Worker processes, in which a compiler may crash, hang and write files without harm to the user.

`Workers` calls functions in a process and replaces it when it dies; each phase of a call has a time
limit. Processes are forked from a `ForkServer` that has imported torch, and their files stay in a
`Sandbox`. Tasks are marked with `runs_in_worker`.
"""

from __future__ import annotations

from shardscope.compile.diagnose.worker.by_value import pickle_for_script
from shardscope.compile.diagnose.worker.fork_server import (
    ForkServer,
    FreshProcess,
    ScriptRun,
    open_fork_server,
    prewarm,
)
from shardscope.compile.diagnose.worker.graphs import (
    SubgraphData,
    build_subgraph,
    describe_subgraph,
)
from shardscope.compile.diagnose.worker.pool import PREPARING, STARTING, Workers
from shardscope.compile.diagnose.worker.sandbox import (
    FIRST_LINE,
    SAVED_NAME,
    SCRIPT_NAME,
    OutputFolder,
    seed_inductor_cache,
)
from shardscope.compile.diagnose.worker.serialization import pack, unpack
from shardscope.compile.diagnose.worker.server import WorkerContext, check_is_task, runs_in_worker

__all__ = [
    "FIRST_LINE",
    "PREPARING",
    "SAVED_NAME",
    "SCRIPT_NAME",
    "STARTING",
    "ForkServer",
    "FreshProcess",
    "OutputFolder",
    "ScriptRun",
    "SubgraphData",
    "WorkerContext",
    "Workers",
    "build_subgraph",
    "check_is_task",
    "describe_subgraph",
    "open_fork_server",
    "pack",
    "pickle_for_script",
    "prewarm",
    "runs_in_worker",
    "seed_inductor_cache",
    "unpack",
]
