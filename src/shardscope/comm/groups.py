"""Names of process groups that are readable and equal on every rank, such as `tp[0-7]`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import final

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardscope._torch.mesh import earlier_twins, group_axes, group_backend, group_label
from shardscope.record import Group, compress_ranks, format_ranks, rank_at


@final
class Membership:
    """A group and this rank's rank in it. Stays valid after the run destroys the group."""

    __slots__ = ("num_ranks", "own_rank", "record")

    def __init__(self, record: Group, *, own_rank: int) -> None:
        self.record = record
        self.num_ranks = record.num_ranks
        self.own_rank = own_rank

    def global_rank(self, rank: int) -> int:
        """The global rank of a rank of the group."""
        return rank_at(self.record.ranks, rank)


@final
class GroupRegistry:
    """The groups used so far, and the number of collectives issued in each."""

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
        """All groups, in the order of first use."""
        return tuple(self._records.values())

    def find(self, torch_name: str) -> Membership | None:
        """This rank's membership of the group with torch's name, if it is registered."""
        return self._memberships.get(torch_name)

    def start_world(self) -> None:
        """Forget torch's names, which a new world reuses; equal groups keep their records."""
        self._memberships = {}
        self._names = set()

    def register(self, group: dist.ProcessGroup) -> Membership:
        """This rank's membership of `group`, which is added if it is new."""
        with self._lock:
            membership = self.find(group.group_name)
            if membership is None:
                membership = Membership(self._describe(group), own_rank=group.rank())
                self._records.setdefault(membership.record.name, membership.record)
                self._memberships[group.group_name] = membership
            return membership

    def add_mesh(self, mesh: DeviceMesh) -> None:
        """Use the axis names of a mesh for its groups."""
        self._axes = {**group_axes(mesh), **self._axes}

    def next_order(self, group: Group) -> int:
        """The position of the next collective among those of `group`."""
        order = self._orders[group.name]
        self._orders[group.name] += 1
        return order

    def _describe(self, group: dist.ProcessGroup) -> Group:
        spans = compress_ranks(dist.get_process_group_ranks(group))
        return Group(
            name=self._unique_name(f"{self._label(group)}[{format_ranks(spans)}]", group),
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

    def _unique_name(self, name: str, group: dist.ProcessGroup) -> str:
        """The name, with a number if groups of the same ranks were created before.

        Numbers follow the order of creation: the order of first use may differ between ranks.
        """
        label = self._label(group)
        count = 1 + sum(self._label(twin) == label for twin in earlier_twins(group))
        while (candidate := name if count == 1 else f"{name}#{count}") in self._names:
            count += 1
        self._names.add(candidate)
        return candidate
