"""Threaded ranks: all ranks of a small mesh as threads of this process, with data.

A cooperative scheduler lets one thread run at a time, until it waits for another rank.
"""

from __future__ import annotations

import math
import operator
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, TypeVar, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardscope._torch.dispatch import disable_dispatch_modes
from shardscope._torch.process_groups.collective_semantics import CollectiveRequest, fill_outputs
from shardscope._torch.process_groups.rank_state import RankState
from shardscope._torch.process_groups.threaded import GroupKey, joined_world, threaded_backend
from shardscope.errors import CollectiveError, RankError, ShardscopeError, WorldError


class RankContext(Protocol):
    """Process-wide state, such as random generators, of which each rank needs its own."""

    def leave(self) -> None:
        """The rank stops running: save its state."""

    def enter(self) -> None:
        """The rank runs again: restore its state."""


class RankCancelled(BaseException):
    """Raised in the other ranks when a rank fails.

    Not an Exception, so that a program that catches those ends too.
    """


@final
class CooperativeScheduler:
    """Lets one rank run at a time; the first failure ends all ranks."""

    def __init__(self, num_ranks: int, make_context: Callable[[int], RankContext]) -> None:
        self._turns = [threading.Event() for _ in range(num_ranks)]
        self._contexts = [make_context(rank) for rank in range(num_ranks)]
        self._ready: deque[int] = deque(range(num_ranks))
        self._waiting: dict[int, str] = {}  # by rank: what it waits for, as text
        self._ended: set[int] = set()
        self._all_ended = threading.Event()
        self._lock = threading.Lock()
        self.results: list[Any] = [None] * num_ranks
        self.failure: tuple[int | None, BaseException] | None = None  # rank, error

    def run(self, function: Callable[[int], Any], *, poll_s: float = 0.2) -> None:
        """Run the function as each rank, until all have ended; see `results` and `failure`."""
        threads = [
            threading.Thread(target=self._run_rank, args=(rank, function), name=f"rank {rank}")
            for rank in range(len(self._turns))
        ]
        for thread in threads:
            thread.daemon = True  # a rank in an endless loop must not keep the process alive
            thread.start()
        try:
            self._start_next()
            while not self._all_ended.wait(poll_s):
                pass
        except BaseException as error:
            self._fail(None, error)
            self._all_ended.wait(poll_s * len(threads))
            raise
        finally:
            self._join_threads(threads, poll_s)

    def _join_threads(self, threads: Sequence[threading.Thread], patience_s: float) -> None:
        """Let the threads end one after the other.

        Threads that end at the same time may deadlock: one holds a lock of torch and waits for
        the GIL, the other holds the GIL and waits for torch's lock.
        """
        for rank, thread in enumerate(threads):
            self._turns[rank].set()
            thread.join(None if rank in self._ended else patience_s)

    def wait(self, rank: int, purpose: str) -> None:
        """Called by the running rank: let other ranks run until one of them calls `wake(rank)`."""
        self._check()
        self._waiting[rank] = purpose
        self._contexts[rank].leave()
        self._start_next()
        self._wait_for_turn(rank)
        self._check()

    def wake(self, rank: int) -> None:
        """Called by the running rank: `rank` may continue at its next turn."""
        if self._waiting.pop(rank, None) is not None:
            self._ready.append(rank)

    def _run_rank(self, rank: int, function: Callable[[int], Any]) -> None:
        try:
            self._wait_for_turn(rank)
            try:
                self._check()
                self.results[rank] = function(rank)
            finally:
                self._contexts[rank].leave()
        except RankCancelled:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            self._fail(rank, error)
        finally:  # in any case, other ranks must not wait for this one
            self._ended.add(rank)
            self._start_next()
            if len(self._ended) == len(self._turns):
                self._all_ended.set()
            self._turns[rank].wait()

    def _wait_for_turn(self, rank: int) -> None:
        self._turns[rank].wait()
        self._turns[rank].clear()
        self._contexts[rank].enter()

    def _check(self) -> None:
        if self.failure is not None:
            raise RankCancelled

    def _fail(self, rank: int | None, error: BaseException) -> None:
        with self._lock:
            if self.failure is None:
                self.failure = (rank, error)
        # The waiting ranks run one after the other, and raise RankCancelled.
        self._ready.extend(self._waiting)
        self._waiting.clear()

    def _start_next(self) -> None:
        if not self._ready and self._waiting:
            self._fail(None, CollectiveError(self._describe_deadlock()))
        if self._ready:
            self._turns[self._ready.popleft()].set()

    def _describe_deadlock(self) -> str:
        waits = [f"rank {rank} waits in {self._waiting[rank]}" for rank in sorted(self._waiting)]
        shown = "; ".join(waits[:4]) + (" …" if len(waits) > 4 else "")
        ended = ", ".join(map(str, sorted(self._ended)))
        rest = f"; rank {ended} has ended" if ended else ""
        return (
            f"the ranks deadlock: {shown}{rest}. Let every rank of a group "
            "issue the same collectives in the same order."
        )


ResultT = TypeVar("ResultT")

_MAX_RANKS = 256
_world_lock = threading.Lock()


def run_ranks_in_threads(
    mesh: Mapping[str, int],
    function: Callable[[int, DeviceMesh], ResultT],
    *,
    device: str = "cpu",
) -> list[ResultT]:
    """Call `function(rank, device_mesh)` as each rank of the mesh, and return the results by rank.

    The ranks take turns: a rank runs until it has to wait for another. Each has its own state of
    the default generators of torch, Python and numpy, which starts equal on all. If a rank raises,
    all ranks end and a RankError is raised; a deadlock raises a CollectiveError.
    """
    axes = _checked_axes(mesh)
    size = math.prod(axes.values())
    settings = _ThreadSettings()

    def run_rank(rank: int, store: Any) -> ResultT:
        with ExitStack() as stack:
            stack.enter_context(settings.applied())
            stack.enter_context(joined_world(rank, size, store))
            own = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
            return function(rank, own)

    with _exclusive_ranks():
        scheduler = CooperativeScheduler(size, lambda _: RankState())
        with threaded_backend(_Exchange(scheduler)) as store:
            scheduler.run(lambda rank: run_rank(rank, store))
    if scheduler.failure is not None:
        raise _explain(*scheduler.failure)
    return list(scheduler.results)


def _explain(rank: int | None, error: BaseException) -> BaseException:
    if rank is None or isinstance(error, ShardscopeError):  # its message needs no prefix
        return error
    failure = RankError(f"rank {rank} failed: {type(error).__name__}: {error}", rank=rank)
    failure.__cause__ = error
    return failure


@final
class _Exchange:
    """Exchanges the data of collectives and point-to-point messages between the ranks."""

    def __init__(self, scheduler: CooperativeScheduler) -> None:
        self._scheduler = scheduler
        self._posts: dict[GroupKey, dict[int, CollectiveRequest]] = defaultdict(dict)
        self._p2p: dict[tuple[GroupKey, int], deque[tuple[int, int, torch.Tensor]]] = defaultdict(
            deque
        )
        self._receivers: dict[tuple[GroupKey, int], int] = {}

    def join(self, group: GroupKey, rank: int, request: CollectiveRequest) -> None:
        posts = self._posts[group]
        posts[rank] = request
        if len(posts) < len(group.ranks):
            self._scheduler.wait(group.ranks[rank], f"{request.describe()} with {group.describe()}")
            return
        del self._posts[group]
        with disable_dispatch_modes():
            fill_outputs([posts[member] for member in range(len(group.ranks))])
        for member in range(len(group.ranks)):
            self._scheduler.wake(group.ranks[member])

    def send(self, group: GroupKey, rank: int, to: int, tag: int, tensor: torch.Tensor) -> None:
        self._p2p[group, to].append((rank, tag, tensor))
        self._scheduler.wake(group.ranks[to])

    def receive(
        self, group: GroupKey, rank: int, sender: int | None, tag: int
    ) -> tuple[int, torch.Tensor]:
        messages = self._p2p[group, rank]
        while True:
            for message in messages:
                if message[1] == tag and sender in (None, message[0]):
                    messages.remove(message)
                    return message[0], message[2]
            source = "anyone" if sender is None else f"rank {group.ranks[sender]}"
            self._scheduler.wait(group.ranks[rank], f"a receive from {source}")


@final
class _ThreadSettings:
    """torch's thread-local settings of the calling thread: grad mode, device and autocast."""

    def __init__(self) -> None:
        self._has_grad = torch.is_grad_enabled()
        self._device = torch.get_default_device()
        self._autocast = {
            kind: torch.get_autocast_dtype(kind)
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        }

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the same settings on the current thread."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._has_grad))
            # Backward must run on the thread of its rank.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if self._device.type != "cpu":
                stack.enter_context(self._device)
            for kind, dtype in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype))
            yield


@contextmanager
def _exclusive_ranks() -> Iterator[None]:
    if not _world_lock.acquire(blocking=False):
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
        _world_lock.release()


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
