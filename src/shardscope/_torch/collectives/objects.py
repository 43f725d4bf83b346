"""Replaces the bodies of torch's object collectives, and reads their arguments as torch does."""

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

_C10D = "torch.distributed.distributed_c10d"

to_group_rank: Callable[..., int] = find_name(
    f"{_C10D}._canonicalize_group_rank", "read the roots of object collectives as torch does"
)
"""The rank in the group, given either a global rank or a rank in the group."""

refuse_self = find_name(
    f"{_C10D}._check_not_self_rank", "reject sending objects from a rank to itself"
)
"""Raise ValueError if a rank of the group is this process."""


warn_not_in_group = find_name(
    f"{_C10D}._warn_not_in_group", "warn of object collectives in groups that exclude this rank"
)
"""Warn that this process is not a member of the group that was passed to a function."""


@contextmanager
def replace_body(name: str, body: Callable[..., Any]) -> Iterator[None]:
    """Make `torch.distributed.<name>` run `body`, also where it was imported by name before.

    It accepts the arguments that the function accepts in the installed version of torch.
    """
    cell = _find_cell(getattr(dist, name))
    original = cell.cell_contents
    signature, accepted = inspect.signature(original), inspect.signature(body).parameters

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        for argument, value in arguments.items():
            if argument not in accepted and value is not signature.parameters[argument].default:
                raise WorldError(
                    f"torch.distributed.{name} was called with {argument}={value!r:.60}, which "
                    f"simulate() does not know. Leave {argument} out in a simulated world."
                )
        return body(**{key: value for key, value in arguments.items() if key in accepted})

    cell.cell_contents = call
    try:
        yield
    finally:
        cell.cell_contents = original


def is_gathered_into_tensor() -> bool:
    """Whether `all_gather_object` gathers into a single tensor (torch 2.15), or into a list."""
    code = inspect.unwrap(dist.all_gather_object).__code__
    return "all_gather_single" in code.co_names


def _find_cell(function: Any) -> CellType:
    """The closure cell in which torch's wrapper, which logs exceptions, has the function."""
    names = function.__code__.co_freevars
    if "func" not in names:
        raise LookupError(f"{function.__qualname__} wraps no function called 'func'.")
    cell: CellType = function.__closure__[names.index("func")]
    return cell
