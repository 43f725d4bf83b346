"""Ops that get plain tensors and DTensors together, which DTensor refuses one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardscope._torch.dispatch import TorchDispatchMode
from shardscope._torch.private import find_name
from shardscope._torch.propagation import op_handlers

__all__ = ["allow_mixing"]

tree_leaves = find_name(
    "torch.utils._pytree.tree_leaves", "find the tensors among the arguments of an op"
)
tree_map = find_name(
    "torch.utils._pytree.tree_map", "replace the arguments of an op by replicated tensors"
)

_REFUSAL = "got mixed torch.Tensor and DTensor"

Meet = Callable[[str, Sequence[torch.Tensor], DTensor], None]
Make = Callable[[torch.Tensor], None]


@contextmanager
def allow_mixing(*, meet: Meet, make: Make) -> Iterator[None]:
    """Take plain tensors for replicated ones where an op gets both kinds, and tell `meet`.

    `make` is told of each plain tensor that an op makes, so that `meet` may know where from.
    Compiled code runs eagerly: under a mode, torch.compile would give it up for good.
    """
    with torch.compiler.set_stance("force_eager"), _Mixing(meet, make):
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
        plain = [tensor for tensor in tensors if _is_plain(tensor)]
        if placed is not None and plain and not _is_allowed():
            return self._run_mixed(func, args, kwargs, plain, placed)
        result = func(*args, **kwargs)
        if placed is None:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._make(leaf)
        return result

    def _run_mixed(
        self, func: Any, args: Any, kwargs: Any, plain: list[torch.Tensor], placed: DTensor
    ) -> Any:
        # What a context such as loss_parallel() runs an op by may take both.
        if func in op_handlers():
            try:
                return func(*args, **kwargs)
            except RuntimeError as error:
                if _REFUSAL not in str(error):
                    raise
        self._meet(str(func), plain, placed)
        args, kwargs = tree_map(lambda leaf: _replicate(leaf, placed), (args, kwargs))
        return func(*args, **kwargs)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether DTensor refuses it; what has a single element it takes for a number."""
    return not isinstance(tensor, DTensor) and tensor.numel() != 1


def _is_allowed() -> bool:
    """Whether the user has said that plain tensors are the same on every rank."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


def _replicate(leaf: Any, like: DTensor) -> Any:
    if not isinstance(leaf, torch.Tensor) or not _is_plain(leaf):
        return leaf
    mesh = like.device_mesh
    return DTensor.from_local(leaf, mesh, [Replicate()] * mesh.ndim, run_check=False)
