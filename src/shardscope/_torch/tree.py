"""Nested containers of op arguments and results (lists, tuples, dicts): torch's pytrees."""

from __future__ import annotations

from typing import Any

import torch

from shardscope._torch.private import find_name

tree_leaves = find_name(
    "torch.utils._pytree.tree_leaves", "find the tensors among the arguments of an op"
)
"""`tree_leaves(tree)`: the leaves of nested containers, as a list."""

tree_map = find_name(
    "torch.utils._pytree.tree_map", "replace the arguments of an op by replicated tensors"
)
"""`tree_map(function, tree)`: the same containers with `function(leaf)` for each leaf."""


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of nested lists, tuples and dicts, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def map_tensor_leaves(function: Any, tree: Any) -> Any:
    """The same nested containers with `function(tensor)` in place of each tensor."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)
