"""Where the autograd engine is on this thread: which graph task, which node, made when."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import _get_sequence_nr

__all__ = [
    "NO_GRAPH_TASK",
    "current_graph_task",
    "current_node",
    "is_in_backward",
    "next_sequence_number",
    "node_number",
    "node_origin",
]

NO_GRAPH_TASK = -1

next_sequence_number = _get_sequence_nr
"""The number that the next autograd node made on this thread will carry."""

current_node = torch._C._current_autograd_node
"""The node the engine is executing on this thread, or None."""


current_graph_task = torch._C._current_graph_task_id
"""The number of the backward that the engine is executing on this thread, or NO_GRAPH_TASK."""


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
    """The number that `node` was given, counted by the thread that made it."""
    return int(node._sequence_nr())
