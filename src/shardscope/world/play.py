"""`play(mesh, function)`: all ranks of a small mesh in this process, on tensors with data.

Each rank is a thread of its own with a process group of its own; what they say to each other
arrives. Where `simulate` is one rank of a world of any size and sends nothing, this is all ranks
of one that is small enough.
"""

from __future__ import annotations

import math
import operator
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardscope._torch.dispatch import without_modes
from shardscope._torch.played_collectives import Posted, carry_out
from shardscope._torch.played_group import (
    GroupKey,
    joined_world,
    played_backend,
)
from shardscope._torch.rank_state import RankState
from shardscope.errors import RankError, ShardscopeError, WorldError
from shardscope.world.baton import Baton

__all__ = ["play"]

ResultT = TypeVar("ResultT")

_MAX_RANKS = 256
_taken = threading.Lock()


def play(
    mesh: Mapping[str, int],
    function: Callable[[int, DeviceMesh], ResultT],
    *,
    device: str = "cpu",
) -> list[ResultT]:
    """Call `function(rank, device_mesh)` as each rank of the mesh, and return what each returned.

    The ranks take turns: one runs until it has to wait for another. Random numbers, of torch's,
    Python's and numpy's default generators, are each rank's own, and begin alike. If a rank raises,
    all end and that is raised as a RankError; so is a wait that has no end.
    """
    axes = _checked_axes(mesh)
    size = math.prod(axes.values())
    here = _Thread()

    def live(rank: int, store: Any) -> ResultT:
        with ExitStack() as stack:
            stack.enter_context(here.carried_over())
            stack.enter_context(joined_world(rank, size, store))
            own = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
            return function(rank, own)

    with _the_only_ranks():
        baton = Baton(size, lambda _: RankState())
        with played_backend(_Exchange(baton)) as store:
            baton.run(lambda rank: live(rank, store))
    if baton.failure is not None:
        raise _explain(*baton.failure)
    return list(baton.results)


def _explain(rank: int | None, error: BaseException) -> BaseException:
    if rank is None or isinstance(error, ShardscopeError):  # which says all there is to say
        return error
    failure = RankError(f"rank {rank} failed: {type(error).__name__}: {error}", rank=rank)
    failure.__cause__ = error
    return failure


@final
class _Exchange:
    """Where the ranks that have the baton leave what they have, and find what they wait for."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self._posts: dict[GroupKey, dict[int, Posted]] = defaultdict(dict)
        self._mail: dict[tuple[GroupKey, int], deque[tuple[int, int, torch.Tensor]]] = defaultdict(
            deque
        )
        self._receivers: dict[tuple[GroupKey, int], int] = {}

    def meet(self, group: GroupKey, rank: int, posted: Posted) -> None:
        posts = self._posts[group]
        posts[rank] = posted
        if len(posts) < len(group.ranks):
            self._baton.wait(group.ranks[rank], f"{posted.describe()} with {group.describe()}")
            return
        del self._posts[group]
        with without_modes():
            carry_out([posts[member] for member in range(len(group.ranks))])
        for member in range(len(group.ranks)):
            self._baton.wake(group.ranks[member])

    def send(self, group: GroupKey, rank: int, to: int, tag: int, tensor: torch.Tensor) -> None:
        self._mail[group, to].append((rank, tag, tensor))
        self._baton.wake(group.ranks[to])

    def receive(
        self, group: GroupKey, rank: int, sender: int | None, tag: int
    ) -> tuple[int, torch.Tensor]:
        letters = self._mail[group, rank]
        while True:
            for letter in letters:
                if letter[1] == tag and sender in (None, letter[0]):
                    letters.remove(letter)
                    return letter[0], letter[2]
            whom = "anyone" if sender is None else f"rank {group.ranks[sender]}"
            self._baton.wait(group.ranks[rank], f"a receive from {whom}")


@final
class _Thread:
    """What torch keeps for each thread, as it is where the ranks are begun."""

    def __init__(self) -> None:
        self._has_grad = torch.is_grad_enabled()
        self._device = torch.get_default_device()
        self._autocast = {
            kind: torch.get_autocast_dtype(kind)
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        }

    @contextmanager
    def carried_over(self) -> Iterator[None]:
        """The same on another thread."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._has_grad))
            # Backward must stay on the thread of its rank.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if self._device.type != "cpu":
                stack.enter_context(self._device)
            for kind, dtype in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype))
            yield


@contextmanager
def _the_only_ranks() -> Iterator[None]:
    if not _taken.acquire(blocking=False):
        raise WorldError(
            "ranks are already running in this process. Let them finish first: worlds cannot "
            "be nested."
        )
    try:
        if dist.is_initialized():
            raise WorldError(
                "ranks can run only in a process without a process group, and this one has "
                f"one ({dist.get_backend()}, {dist.get_world_size()} ranks). Call "
                "torch.distributed.destroy_process_group() first."
            )
        yield
    finally:
        _taken.release()


def _checked_axes(mesh: Mapping[str, int]) -> dict[str, int]:
    axes = {str(name): operator.index(size) for name, size in mesh.items()}
    if not axes or any(size < 1 for size in axes.values()):
        raise WorldError(
            f"the mesh is {dict(mesh)!r:.80}. Give each axis a name and a size of one or more, for "
            'example {"dp": 2, "tp": 4}.'
        )
    size = math.prod(axes.values())
    if size > _MAX_RANKS:
        raise WorldError(
            f"the mesh has {size:,} ranks, and each would hold its own tensors in this process. "
            f"Choose at most {_MAX_RANKS}; what is right on a small mesh is right on a large one."
        )
    return axes
