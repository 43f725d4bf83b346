"""How torch's object collectives are reached, and how they read their arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CellType
from typing import Any

import torch.distributed as dist

from shardscope._torch.private import find_name
from shardscope.errors import WorldError

__all__ = [
    "is_gathered_into_one_tensor",
    "refuse_self",
    "replace_body",
    "to_group_rank",
    "warn_not_in_group",
]

_C10D = "torch.distributed.distributed_c10d"

to_group_rank: Callable[..., int] = find_name(
    f"{_C10D}._canonicalize_group_rank", "read the roots of object collectives as torch does"
)
"""A rank of the world or of the group, of which exactly one must be given, as one of the group."""

refuse_self = find_name(f"{_C10D}._check_not_self_rank", "reject sending objects to the own rank")
"""Raise ValueError if a rank of the group is this process."""


warn_not_in_group = find_name(
    f"{_C10D}._warn_not_in_group", "warn of object collectives in groups that exclude the own rank"
)
"""Warn that this process is not in the group that a function was given."""


@contextmanager
def replace_body(name: str, body: Callable[..., Any]) -> Iterator[None]:
    """Let `torch.distributed.<name>` do what `body` does, under whatever name it was imported.

    It takes the arguments that torch's own takes, in the version that is installed.
    """
    cell = _find_cell(getattr(dist, name))
    original = cell.cell_contents
    signature, known = inspect.signature(original), inspect.signature(body).parameters

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        for argument, value in arguments.items():
            if argument not in known and value is not signature.parameters[argument].default:
                raise WorldError(
                    f"torch.distributed.{name} was called with {argument}={value!r:.60}, which "
                    f"simulate() does not know. Leave {argument} out in a simulated world."
                )
        return body(**{key: value for key, value in arguments.items() if key in known})

    cell.cell_contents = call
    try:
        yield
    finally:
        cell.cell_contents = original


def is_gathered_into_one_tensor() -> bool:
    """Whether `all_gather_object` gathers into one tensor, as since torch 2.15, or into a list."""
    own = inspect.unwrap(dist.all_gather_object).__code__
    return "all_gather_single" in own.co_names


def _find_cell(function: Any) -> CellType:
    """Where torch's wrapper, which logs exceptions, keeps the function it calls."""
    names = function.__code__.co_freevars
    if "func" not in names:
        raise LookupError(f"{function.__qualname__} wraps no function called 'func'.")
    cell: CellType = function.__closure__[names.index("func")]
    return cell
