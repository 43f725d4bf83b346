"""The state of the autograd engine on this thread: graph task, node, sequence numbers."""

from __future__ import annotations

from typing import Any

import torch

from shardscope._torch.private import find_name

NO_GRAPH_TASK = -1

next_sequence_number = find_name(
    "torch.autograd._get_sequence_nr", "number the autograd nodes that a module creates in forward"
)
"""The sequence number of the next autograd node that is created on this thread."""

current_node = find_name(
    "torch._C._current_autograd_node",
    "find the autograd node of a collective in backward",
)
"""The node the engine is executing on this thread, or None."""


current_graph_task = find_name(
    "torch._C._current_graph_task_id", "distinguish backward from forward"
)
"""The number of the backward that the engine is executing on this thread, or NO_GRAPH_TASK."""


NEEDED = (next_sequence_number, current_node, current_graph_task)
"""Private names that are required to find the module that created an autograd node."""


def is_in_backward() -> bool:
    """Whether the engine is executing a graph on this thread."""
    return bool(current_graph_task() != NO_GRAPH_TASK)


def node_origin(node: Any) -> torch.Tensor | int:
    """The leaf whose gradient `node` accumulates, or else the node's sequence number."""
    if type(node).__name__ == "AccumulateGrad":
        leaf: torch.Tensor = node.variable
        return leaf
    return node_number(node)


def node_number(node: Any) -> int:
    """The sequence number of `node`, counted by the thread that created it."""
    return int(node._sequence_nr())
