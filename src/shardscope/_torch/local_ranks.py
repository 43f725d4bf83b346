"""All ranks of a small mesh in one process, each with data of its own: sums really add up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from shardscope._torch.dispatch import without_modes
from shardscope._torch.private import find_name

__all__ = ["all_ranks", "join_ranks", "split_ranks"]

_NEED = "compare the numbers of all ranks"

LocalTensor = find_name("torch.distributed._local_tensor.LocalTensor", _NEED)
LocalTensorMode = find_name("torch.distributed._local_tensor.LocalTensorMode", _NEED)


@contextmanager
def all_ranks(ranks: frozenset[int]) -> Iterator[None]:
    """Be all of these ranks at once, on tensors with data, until the context ends."""
    with without_modes(), LocalTensorMode(ranks):
        yield


def join_ranks(pieces: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """One tensor that is, on each rank, that rank's piece."""
    joined: torch.Tensor = LocalTensor(dict(pieces))
    return joined


def split_ranks(tensor: torch.Tensor) -> dict[int, torch.Tensor]:
    """Each rank's piece of a tensor, or of a DTensor's local one."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if hasattr(tensor, "wait"):  # a collective's result that nobody has waited for
        tensor = tensor.wait()
    assert isinstance(tensor, LocalTensor), type(tensor)
    return dict(tensor._local_tensors)
