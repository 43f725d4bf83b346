"""Process groups under names that people can read and that every rank agrees on: `tp[0-7]`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardscope._torch.meshes import group_axes, group_backend, group_label
from shardscope.record import Group, compress_ranks, format_ranks

__all__ = ["GroupBook"]


class GroupBook:
    """The groups met so far, and how many collectives each has issued."""

    def __init__(self, meshes: Iterable[DeviceMesh]) -> None:
        self._axes = group_axes(meshes)
        self._groups: dict[str, Group] = {}
        self._names: set[str] = set()
        self._orders: Counter[str] = Counter()

    @property
    def groups(self) -> tuple[Group, ...]:
        """Every group met, in the order of first use."""
        return tuple(self._groups.values())

    def __contains__(self, group: dist.ProcessGroup) -> bool:
        return group.group_name in self._groups

    def add_mesh(self, mesh: DeviceMesh) -> None:
        """Learn the axes of a mesh that was not known before."""
        self._axes = {**group_axes([mesh]), **self._axes}

    def find(self, group: dist.ProcessGroup) -> Group:
        """The record of `group`."""
        known = self._groups.get(group.group_name)
        if known is None:
            known = self._groups[group.group_name] = self._describe(group)
        return known

    def next_order(self, group: Group) -> int:
        """The position of the next collective among those of `group`."""
        order = self._orders[group.name]
        self._orders[group.name] += 1
        return order

    def _describe(self, group: dist.ProcessGroup) -> Group:
        ranks = dist.get_process_group_ranks(group)
        spans = compress_ranks(ranks)
        axis = self._axes.get(group.group_name) or group_label(group)
        covers_world = len(ranks) == dist.get_world_size()
        label = axis or ("world" if covers_world else "group")
        return Group(
            name=self._unused(f"{label}[{format_ranks(spans)}]"),
            torch_name=group.group_name,
            ranks=spans,
            num_ranks=len(ranks),
            axis=axis,
            backend=group_backend(group),
        )

    def _unused(self, name: str) -> str:
        candidate, count = name, 1
        while candidate in self._names:
            count += 1
            candidate = f"{name}#{count}"
        self._names.add(candidate)
        return candidate
