"""Storages, which are what memory is taken for: whose they are, when they change, when they die."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["count_writes", "is_wrapper_type", "plain_tensors", "watched_resizes"]


def is_wrapper_type(cls: type) -> bool:
    """Whether tensors of this type hold others, as DTensor does, and no memory of their own."""
    return hasattr(cls, "__tensor_flatten__")


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor itself, or those that it wraps."""
    if not is_wrapper_type(type(tensor)):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        held = getattr(tensor, name)
        if isinstance(held, torch.Tensor):
            yield from plain_tensors(held)


def count_writes(tensor: torch.Tensor) -> int:
    """How often ops have written to the tensor, or to others that share its memory."""
    return 0 if tensor.is_inference() else int(tensor._version)


@contextmanager
def watched_resizes(tell: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Tell of every storage that Python code resizes: no op does, so no dispatch mode sees it."""
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: Any, *args: Any, **kwargs: Any) -> Any:
        result = resize(storage, *args, **kwargs)
        tell(storage)
        return result

    torch.UntypedStorage.resize_ = resize_and_tell  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize
