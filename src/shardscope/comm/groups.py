"""Process groups under names that people can read and that every rank agrees on: `tp[0-7]`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import final

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardscope._torch.meshes import earlier_twins, group_axes, group_backend, group_label
from shardscope.record import Group, compress_ranks, format_ranks, rank_at

__all__ = ["GroupBook", "Membership"]


@final
class Membership:
    """A group as this rank is in it. Outlives the group itself, which a run may destroy."""

    __slots__ = ("num_ranks", "own_rank", "record")

    def __init__(self, record: Group, *, own_rank: int) -> None:
        self.record = record
        self.num_ranks = record.num_ranks
        self.own_rank = own_rank

    def global_rank(self, rank: int) -> int:
        """A rank of the group as a rank of the world."""
        return rank_at(self.record.ranks, rank)


@final
class GroupBook:
    """The groups met so far, and how many collectives each has issued."""

    def __init__(self, meshes: Iterable[DeviceMesh] = ()) -> None:
        self._axes: dict[str, str] = {}
        self._memberships: dict[str, Membership] = {}
        self._names: set[str] = set()
        self._records: dict[str, Group] = {}
        self._orders: Counter[str] = Counter()
        self._lock = threading.Lock()
        for mesh in meshes:
            self.add_mesh(mesh)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Every group met, in the order of first use."""
        return tuple(self._records.values())

    def find(self, torch_name: str) -> Membership | None:
        """This rank's membership of the group that torch calls so, if it was met before."""
        return self._memberships.get(torch_name)

    def start_world(self) -> None:
        """From now on torch's names are those of other groups; equal groups keep their records."""
        self._memberships = {}
        self._names = set()

    def meet(self, group: dist.ProcessGroup) -> Membership:
        """This rank's membership of `group`, described now if it was not before."""
        with self._lock:
            known = self.find(group.group_name)
            if known is None:
                known = Membership(self._describe(group), own_rank=group.rank())
                self._records.setdefault(known.record.name, known.record)
                self._memberships[group.group_name] = known
            return known

    def add_mesh(self, mesh: DeviceMesh) -> None:
        """Learn the axes of a mesh that was not known before."""
        self._axes = {**group_axes(mesh), **self._axes}

    def next_order(self, group: Group) -> int:
        """The position of the next collective among those of `group`."""
        order = self._orders[group.name]
        self._orders[group.name] += 1
        return order

    def _describe(self, group: dist.ProcessGroup) -> Group:
        spans = compress_ranks(dist.get_process_group_ranks(group))
        return Group(
            name=self._unused(f"{self._label(group)}[{format_ranks(spans)}]", group),
            torch_name=group.group_name,
            ranks=spans,
            num_ranks=group.size(),
            axis=self._axis(group),
            backend=group_backend(group),
        )

    def _axis(self, group: dist.ProcessGroup) -> str | None:
        return self._axes.get(group.group_name) or group_label(group)

    def _label(self, group: dist.ProcessGroup) -> str:
        covers_world = group.size() == dist.get_world_size()
        return self._axis(group) or ("world" if covers_world else "group")

    def _unused(self, name: str, group: dist.ProcessGroup) -> str:
        """Groups of the same ranks are told apart by a number, in the order they were made.

        Not in the order of first use, which may differ between ranks.
        """
        label = self._label(group)
        count = 1 + sum(self._label(twin) == label for twin in earlier_twins(group))
        while (candidate := name if count == 1 else f"{name}#{count}") in self._names:
            count += 1
        self._names.add(candidate)
        return candidate
