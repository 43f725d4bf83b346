"""Where each leaf of a nested value is: the keys that lead to it."""

from __future__ import annotations

from typing import Any

from shardscope._torch.pytree_values import leaves_with_path, unflatten

__all__ = ["leaf_paths"]


def leaf_paths(spec: Any) -> list[tuple[str, ...]] | None:
    """The path of every leaf of a value of that structure; None where it cannot be told."""
    try:
        leaves = leaves_with_path(unflatten(range(spec.num_leaves), spec))
    except Exception:  # noqa: BLE001 - a user's class is made of numbers here, which it may refuse
        return None
    return [tuple(map(_part, path)) for path, _ in leaves]


def _part(key: Any) -> str:
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)
