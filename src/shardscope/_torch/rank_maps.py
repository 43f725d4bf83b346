"""Meshes that compare in constant time, however many ranks they have.

DTensor compares meshes for almost every op it meets, and torch compares two meshes rank by rank: at
16,384 ranks that is most of a first step. Equal lists of ranks are kept once here, so that two
meshes of one world compare by identity.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

from torch.distributed.device_mesh import DeviceMesh

__all__ = ["shared_rank_maps"]


@final
class _RankMap(tuple[int, ...]):
    """A tuple of ranks that is kept once, and so is mostly compared with itself."""

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__


@contextmanager
def shared_rank_maps() -> Iterator[None]:
    """Let meshes made in the context share their lists of ranks."""
    kept: dict[_RankMap, _RankMap] = {}
    original = DeviceMesh.__init__

    def initialize(mesh: Any, *args: Any, **kwargs: Any) -> None:
        original(mesh, *args, **kwargs)
        flat = getattr(mesh, "_flatten_rank_map", None)
        if flat is not None:
            ranks = _RankMap(flat)
            mesh._flatten_rank_map = kept.setdefault(ranks, ranks)

    setattr(DeviceMesh, "__init__", initialize)  # noqa: B010 - mypy has it otherwise
    try:
        yield
    finally:
        setattr(DeviceMesh, "__init__", original)  # noqa: B010
