"""Storages of tensors: wrapper types, version counters, resizes; scaling many tensors at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardscope._torch.private import find_name, is_missing


def is_wrapper_type(cls: type) -> bool:
    """Whether tensors of this type wrap other tensors, as DTensor does, and own no memory."""
    return hasattr(cls, "__tensor_flatten__")


_NEED = "find the memory of tensors inside torch.func's transforms"
_is_transformed = find_name("torch._C._functorch.is_functorch_wrapped_tensor", _NEED)
_unwrap_transformed = find_name("torch._C._functorch.get_unwrapped", _NEED)


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to a transform of torch.func, such as vmap, and not to the program.

    It must not be kept after the transform has ended.
    """
    return not is_missing(_is_transformed) and bool(_is_transformed(tensor))


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor itself, or the tensors that it wraps, at any depth."""
    while is_transformed(tensor):
        tensor = _unwrap_transformed(tensor)
    if not is_wrapper_type(type(tensor)):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        wrapped = getattr(tensor, name)
        if isinstance(wrapped, torch.Tensor):
            yield from plain_tensors(wrapped)


def count_writes(tensor: torch.Tensor) -> int:
    """How often ops wrote to the tensor or to tensors that share its memory; 0 if not counted."""
    return 0 if tensor.is_inference() else int(tensor._version)


@contextmanager
def watched_resizes(notify: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `notify` with every storage that Python resizes, which no dispatch mode sees."""
    resize = torch.UntypedStorage.resize_

    def resize_and_notify(storage: Any, *args: Any, **kwargs: Any) -> Any:
        result = resize(storage, *args, **kwargs)
        notify(storage)
        return result

    torch.UntypedStorage.resize_ = resize_and_notify  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize


def scale_all(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply each tensor by `factor` in place."""
    if tensors:
        torch._foreach_mul_(tensors, factor)
