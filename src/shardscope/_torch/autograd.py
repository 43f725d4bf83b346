"""The autograd engine on this thread, and functions that checkpoints recompute in backward."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from shardscope._torch.frames import engine_code, recompute_code, reentrant_code
from shardscope._torch.private import find_class, find_name, is_missing

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


_get_registry = find_name(
    "torch.distributed._composable.contract._get_registry",
    "recognise modules that are checkpointed in place",
)
CheckpointWrapper = find_class(
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper",
    "recognise modules with a checkpoint wrapper",
)


def is_checkpoint_wrapper(module: nn.Module) -> bool:
    """Whether `module` is the wrapper of a checkpointed module."""
    return isinstance(module, CheckpointWrapper)


def is_checkpointed(module: nn.Module) -> bool:
    """Whether checkpointing was applied to `module` itself, by a wrapper or in place.

    A call of `torch.utils.checkpoint` in a forward cannot be seen before it runs.
    """
    if is_checkpoint_wrapper(module) or is_missing(_get_registry):
        return is_checkpoint_wrapper(module)
    return "checkpoint" in (_get_registry(module) or {})


_ENGINE, _REENTRANT, _NON_REENTRANT = engine_code(), reentrant_code(), recompute_code()


def find_recomputed(frame: FrameType | None) -> Any:
    """The function being recomputed around `frame`, inside the innermost backward, or None."""
    while frame is not None and frame.f_code is not _ENGINE:
        if frame.f_code is _NON_REENTRANT:
            return frame.f_locals["fn"]
        if frame.f_code is _REENTRANT:
            return frame.f_locals["ctx"].run_function
        frame = frame.f_back
    return None


def reentrant_nodes(frame: FrameType | None) -> Iterator[Any]:
    """The nodes of reentrant checkpoints whose backward, after recomputation, `frame` is in."""
    while frame is not None:
        if frame.f_code is _REENTRANT:
            yield frame.f_locals["ctx"]
        frame = frame.f_back


def method_owner(function: Any) -> nn.Module | None:
    """The module that `function` is a method of, or None."""
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None
