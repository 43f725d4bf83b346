"""Graphs with the values they are called with, and subsets of their ops as graphs of their own.

A `RecordedGraph` was run eagerly once, so that any subset of its ops can be extracted with the
inputs that it had in that run.

Names of ops (`op_names`) are imported from their module: they need dynamo, which takes seconds to
import, and workers start before that.
"""

from __future__ import annotations

from shardscope.compile.diagnose.subgraph.extract import RecordedGraph, in_order, name_output
from shardscope.compile.diagnose.subgraph.subgraph import (
    Compiler,
    PhaseCallback,
    RunValues,
    Subgraph,
    compute_gradients,
    copy_inputs,
    find_leaf,
    ignore_phase,
    is_non_leaf,
    make_non_leaf,
    name_inputs,
    run,
    synchronize_device,
)

__all__ = [
    "Compiler",
    "PhaseCallback",
    "RecordedGraph",
    "RunValues",
    "Subgraph",
    "compute_gradients",
    "copy_inputs",
    "find_leaf",
    "ignore_phase",
    "in_order",
    "is_non_leaf",
    "make_non_leaf",
    "name_inputs",
    "name_output",
    "run",
    "synchronize_device",
]
