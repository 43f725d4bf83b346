"""Object collectives in a simulated world: the same traffic, answered with this rank's own objects.

Nothing arrives from other ranks, so torch's versions would unpickle memory nobody wrote. These
send tensors of the size that this rank's objects have and leave or copy what this rank holds.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["simulated_object_collectives"]


@contextmanager
def simulated_object_collectives() -> Iterator[None]:
    """Put our versions in torch's place until the context ends."""
    with ExitStack() as stack:
        for function in _FUNCTIONS:
            for module in (dist, distributed_c10d):
                stack.callback(
                    setattr, module, function.__name__, getattr(module, function.__name__)
                )
                setattr(module, function.__name__, function)
        yield


def all_gather_object(
    object_list: list[Any], obj: Any, group: dist.ProcessGroup | None = None
) -> None:
    """Every rank is taken to hold what this one holds."""
    for part in _parts([obj]):
        dist.all_gather([torch.empty_like(part) for _ in object_list], part, group=group)
    object_list[:] = [obj] * len(object_list)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    group_dst: int | None = None,
) -> None:
    """Every rank is taken to hold what this one holds."""
    size, payload = _parts([obj])
    num_ranks = dist.get_world_size(group)
    dist.all_gather([torch.empty_like(size) for _ in range(num_ranks)], size, group=group)
    gathered = None if object_gather_list is None else [torch.empty_like(payload)] * num_ranks
    dist.gather(payload, gathered, dst=dst, group=group, group_dst=group_dst)
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * num_ranks


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
) -> None:
    """The root is taken to hold what this rank holds."""
    root = _rank_in_group(src, group_src, group)
    for part in _parts(object_list):
        dist.broadcast(part, group=group, group_src=root)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    group_src: int | None = None,
) -> None:
    """A root keeps its own piece; another rank keeps what its list holds."""
    root, rank = _rank_in_group(src, group_src, group), dist.get_rank(group)
    pieces = scatter_object_input_list if rank == root else None
    # As torch does, all ranks send as many bytes as the largest object has.
    size, payload = _parts([max(pieces or scatter_object_output_list[:1], key=_num_bytes)])
    dist.broadcast(size, group=group, group_src=root)
    for part in (payload, size):
        parts = None if pieces is None else [part] * len(pieces)
        dist.scatter(torch.empty_like(part), parts, group=group, group_src=root)
    if pieces is not None:
        scatter_object_output_list[0] = pieces[rank]


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    """As torch's: the sizes, then the objects."""
    for part in _parts(object_list):
        dist.send(part, dst=dst, group=group, group_dst=group_dst)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> int:
    """The list keeps what it holds."""
    sizes, payload = _parts(object_list)
    dist.recv(sizes, src=src, group=group, group_src=group_src)
    return dist.recv(payload, src=src, group=group, group_src=group_src)


def _rank_in_group(rank: int | None, group_rank: int | None, group: Any) -> int:
    """The root as a rank of the group; torch takes rank 0 where none is named."""
    if group_rank is not None or dist.get_rank(group) < 0:  # who is not in the group has no say
        return group_rank or 0
    world = dist.group.WORLD
    assert world is not None
    return dist.get_group_rank(group or world, rank or 0)


def _parts(objects: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """What torch sends for objects: a tensor of their sizes, and one of their bytes."""
    num_bytes = sum(_num_bytes(obj) for obj in objects)
    return torch.zeros(len(objects), dtype=torch.long), torch.zeros(num_bytes, dtype=torch.uint8)


def _num_bytes(obj: Any) -> int:
    return len(pickle.dumps(obj))


_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
