"""How torch's object collectives are reached, and how they read their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CellType
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _canonicalize_group_rank,
    _check_not_self_rank,
    _warn_not_in_group,
)

__all__ = ["refuse_self", "replace_body", "to_group_rank", "warn_not_in_group"]

to_group_rank = _canonicalize_group_rank
"""A rank of the world or of the group, of which exactly one must be given, as one of the group."""

refuse_self = _check_not_self_rank
"""Raise ValueError if a rank of the group is this process."""


warn_not_in_group = _warn_not_in_group
"""Warn that this process is not in the group that a function was given."""


@contextmanager
def replace_body(name: str, body: Callable[..., Any]) -> Iterator[None]:
    """Let `torch.distributed.<name>` do what `body` does, under whatever name it was imported."""
    cell = _find_cell(getattr(dist, name))
    original = cell.cell_contents
    cell.cell_contents = body
    try:
        yield
    finally:
        cell.cell_contents = original


def _find_cell(function: Any) -> CellType:
    """Where torch's wrapper, which logs exceptions, keeps the function it calls."""
    names = function.__code__.co_freevars
    if "func" not in names:
        raise LookupError(f"{function.__qualname__} wraps no function called 'func'.")
    cell: CellType = function.__closure__[names.index("func")]
    return cell
