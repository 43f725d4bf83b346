"""Walks nested containers: the arguments and results of ops, of modules, of nodes of a graph.

`leaves` and `map_leaves` know lists, tuples, dicts and slices, and cost less than a microsecond
for the arguments of an op: torch's pytrees take ten times as long, too long for what runs at every
op. Use torch's (the names that begin with `pytree_`) where containers may be
classes that a user registered there, or where their structure has to be restored, and
`attribution.tensors` for the arguments and results of a model.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import fx

from shardscope._torch.private import find_name

pytree_leaves = find_name(
    "torch.utils._pytree.tree_leaves", "find the tensors among the arguments of an op"
)
"""`pytree_leaves(tree)`: the leaves of nested containers, as a list."""

pytree_flatten = find_name(
    "torch.utils._pytree.tree_flatten", "list the inputs of a program or of a module call"
)
"""`pytree_flatten(tree)`: the leaves, and a spec whose `unflatten(leaves)` restores the tree."""

pytree_unflatten = find_name(
    "torch.utils._pytree.tree_unflatten", "restore the structure of a program's inputs and outputs"
)
"""`pytree_unflatten(leaves, spec)`: the tree with this spec."""

pytree_map = find_name(
    "torch.utils._pytree.tree_map", "replace the arguments of an op by replicated tensors"
)
"""`pytree_map(function, tree)`: the same containers with `function(leaf)` for each leaf."""

leaves_with_path = find_name(
    "torch.utils._pytree.tree_leaves_with_path", "name the inputs and outputs of a program"
)
tree_flatten_spec = find_name(
    "torch.fx._pytree.tree_flatten_spec", "accept inputs whose keys are in a different order"
)


def leaves(tree: Any) -> list[Any]:
    """The leaves of nested lists, tuples, dicts and slices, in order: `leaves([1, (2,)])` is
    `[1, 2]`.
    """
    collected: list[Any] = []
    fx.node.map_aggregate(tree, collected.append)
    return collected


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples, dicts and slices, in order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same nested containers with `function(leaf)` in place of each leaf.

    Containers are lists, tuples, named tuples, dicts and slices, and keep their types; a
    `torch.Size` is a leaf.
    """
    if isinstance(tree, list | tuple):
        if isinstance(tree, torch.Size):
            return function(tree)
        items = [map_leaves(function, item) for item in tree]
        # Named tuples, unlike torch's structseqs such as the result of max, take fields one by one.
        is_named = hasattr(tree, "__match_args__") and not hasattr(tree, "n_fields")
        return type(tree)(*items) if is_named else type(tree)(items)
    if isinstance(tree, dict):
        mapped = {key: map_leaves(function, item) for key, item in tree.items()}
        if type(tree) is dict:
            return mapped
        duplicate = copy(tree)  # of a subclass, with attributes of its own
        for key, item in mapped.items():
            duplicate[key] = item
        return duplicate
    if isinstance(tree, slice):
        return slice(*[map_leaves(function, end) for end in (tree.start, tree.stop, tree.step)])
    return function(tree)


def map_tensor_leaves(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The same nested containers with `function(tensor)` in place of each tensor."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def flatten_as(nest: Any, tree: Any) -> list[Any] | None:
    """The leaves of `nest` in the order of the spec `tree`; None if its keys differ."""
    try:
        in_order: list[Any] = tree_flatten_spec(nest, tree)
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError):
        return None
    return in_order if len(in_order) == len(pytree_flatten(nest)[0]) else None


def leaf_paths(spec: Any) -> list[tuple[str, ...]] | None:
    """The path of every leaf of a value with this spec; None if it cannot be built."""
    try:
        numbered = leaves_with_path(pytree_unflatten(range(spec.num_leaves), spec))
    except Exception:  # noqa: BLE001 - a user's class is built from numbers here, and may raise
        return None
    return [tuple(map(_part, path)) for path, _ in numbered]


def _part(key: Any) -> str:
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)
