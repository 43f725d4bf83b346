"""Ops that get plain tensors and DTensors together, which DTensor refuses one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._pytree import tree_leaves

from shardscope._torch.dispatch import TorchDispatchMode

__all__ = ["allow_mixing"]

Meet = Callable[[str, Sequence[torch.Tensor], DTensor], None]
Make = Callable[[torch.Tensor], None]


@contextmanager
def allow_mixing(*, meet: Meet, make: Make) -> Iterator[None]:
    """Take plain tensors for replicated ones where an op gets both kinds, and tell `meet`.

    `make` is told of each plain tensor that an op makes, so that `meet` may know where from.
    """
    with implicit_replication(), _Mixing(meet, make):
        yield


@final
class _Mixing(TorchDispatchMode):
    def __init__(self, meet: Meet, make: Make) -> None:
        super().__init__()
        self._meet = meet
        self._make = make

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        placed = next((tensor for tensor in tensors if isinstance(tensor, DTensor)), None)
        # DTensor itself takes a number in a tensor for a number.
        plain = [t for t in tensors if not isinstance(t, DTensor) and not _is_number(t)]
        if placed is not None and plain:
            self._meet(str(func), plain, placed)
        result = func(*args, **kwargs)
        if placed is None:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._make(leaf)
        return result


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.ndim == 0 and tensor.numel() == 1
