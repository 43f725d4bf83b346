"""A world of one rank, whose collectives answer at once with what they were given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["mesh_of_one", "world_of_one"]


@contextmanager
def world_of_one() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of_one(axis: str) -> DeviceMesh:
    return init_device_mesh("cpu", (1,), mesh_dim_names=(axis,))
