"""Object collectives (`all_gather_object`, …) in a simulated world: same traffic, other results.

Nothing arrives from other ranks, so torch's versions would unpickle uninitialized memory. These
issue the same collectives, with the sizes of this rank's objects, and return copies of these.
Ranks of a launched program exchange the objects themselves, through a `Mailbox`.
"""

from __future__ import annotations

import io
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist

from shardscope._torch.collectives.objects import (
    is_gathered_into_tensor,
    refuse_self,
    replace_body,
    to_group_rank,
    warn_not_in_group,
)
from shardscope._torch.fake import is_fake
from shardscope._torch.process_groups.known_values import KnownValues

_POLL_SECONDS = 0.02
NEEDED = "needed-"
"""Prefix of the file by which a rank asks for another one to be started."""
SENT = ".pickle"
"""How the name of a file ends with what a rank has sent."""


def dump_objects(value: object) -> bytes:
    """Pickle an object; tensors without data become tensors on meta."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


@final
class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor) or not is_fake(obj):
            return NotImplemented
        layout = (tuple(obj.shape), obj.stride(), obj.dtype, obj.requires_grad)
        return _make_on_meta, layout


def _make_on_meta(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, requires_grad: bool
) -> torch.Tensor:
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return tensor.requires_grad_(requires_grad)


@final
class Mailbox:
    """Sends objects to other ranks, and receives theirs, in the order in which they were sent.

    Several processes may run as the same rank; they send the same, and each receives everything.
    `find_sender` is the rank that sends for a rank, and to that which sends for the receiver.
    """

    def __init__(
        self,
        folder: str | Path,
        rank: int,
        find_sender: Callable[[int], int] = lambda rank: rank,
    ) -> None:
        self._folder = Path(folder)
        self._rank = rank
        self._find_sender = find_sender
        self._num_sent: Counter[int] = Counter()
        self._num_received: Counter[int] = Counter()

    def send(self, destination: int, objects: list[Any]) -> None:
        """Send to a rank."""
        if self._find_sender(self._rank) != self._rank:
            return
        path = self._path(self._rank, destination, self._num_sent[destination])
        self._num_sent[destination] += 1
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(dump_objects(objects))
        os.replace(temporary, path)

    def receive(self, source: int) -> list[Any]:
        """Wait for what a rank has sent next; the rank is started if it does not run."""
        path = self._path(source, self._rank, self._num_received[source])
        self._num_received[source] += 1
        while not path.exists():
            (self._folder / f"{NEEDED}{self._find_sender(source)}").touch()
            time.sleep(_POLL_SECONDS)
        objects: list[Any] = pickle.loads(path.read_bytes())
        return objects

    def _path(self, source: int, destination: int, number: int) -> Path:
        source, destination = self._find_sender(source), self._find_sender(destination)
        return self._folder / f"{source}-{destination}-{number}{SENT}"


__frames__ = "torch's"  # these functions replace torch's

Group = dist.ProcessGroup | None
_save = torch.save  # torch.save itself is replaced where tensors have no data


_mailbox: Mailbox | None = None  # to and from ranks that run as other processes
_known: KnownValues | None = None  # what the ranks give to each collective


@contextmanager
def simulated_object_collectives(
    mailbox: Mailbox | None = None, known: KnownValues | None = None
) -> Iterator[None]:
    """Replace torch's object collectives by ours until the context ends.

    With `mailbox`, objects that are sent to a rank reach it. `known` has what other ranks give.
    """
    with ExitStack() as stack:
        stack.callback(_set_exchange, _mailbox, _known)
        _set_exchange(mailbox, known)
        for function in _FUNCTIONS:
            stack.enter_context(replace_body(function.__name__, function))
        yield


def _set_exchange(mailbox: Mailbox | None, known: KnownValues | None) -> None:
    global _mailbox, _known
    _mailbox, _known = mailbox, known


def all_gather_object(
    object_list: list[Any], obj: Any, group: Group = None, weights_only: bool = False
) -> None:
    """Every rank is assumed to have this rank's object."""
    if _is_outside(group, "all_gather_object"):
        return
    num_ranks = dist.get_world_size(group)
    for part in _parts([obj], weights_only):
        if is_gathered_into_tensor():
            dist.all_gather_into_tensor(part.new_empty(num_ranks * len(part)), part, group=group)
        else:
            dist.all_gather([torch.empty_like(part) for _ in range(num_ranks)], part, group=group)
    _fill(object_list, obj, group, weights_only)
    received = _exchange([obj], group)
    for index, objects in enumerate(received):
        object_list[index] = objects[0]


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
    weights_only: bool = False,
) -> None:
    """Every rank is assumed to have this rank's object."""
    root = _root(dst, group_dst, group)
    if _is_outside(group, "gather_object"):
        return
    is_root = dist.get_rank(group) == root
    if is_root != (object_gather_list is not None):
        raise ValueError("object_gather_list must be given on the destination rank and no other.")
    size, payload = _parts([obj], weights_only)
    num_ranks = dist.get_world_size(group)
    dist.all_gather([torch.empty_like(size) for _ in range(num_ranks)], size, group=group)
    gathered = [torch.empty_like(payload) for _ in range(num_ranks)] if is_root else None
    dist.gather(payload, gathered, group=group, group_dst=root)
    received = _exchange([obj], group)
    if object_gather_list is not None:
        _fill(object_gather_list, obj, group, weights_only)
        for index, objects in enumerate(received):
            object_gather_list[index] = objects[0]


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """The root is assumed to have this rank's objects."""
    root = _root(src, group_src, group)
    if _is_outside(group, "broadcast_object_list"):
        return
    for part in _parts(object_list, weights_only):
        dist.broadcast(part, group=group, group_src=root)
    received = _exchange(object_list, group)
    if received:
        object_list[:] = received[root]


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """The root gets its own object; on other ranks the output list is unchanged."""
    root = _root(src, group_src, group)
    if _is_outside(group, "scatter_object_list"):
        return
    rank = dist.get_rank(group)
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise ValueError("scatter_object_output_list must be a list with room for one object.")
    if rank == root and not scatter_object_input_list:
        raise ValueError("scatter_object_input_list must be given on the source rank.")
    inputs = scatter_object_input_list if rank == root else None
    # As in torch, every rank gets as many bytes as the largest object has.
    candidates = inputs or scatter_object_output_list[:1]
    largest = max(candidates, key=lambda candidate: len(_dump(candidate, weights_only)))
    size, payload = _parts([largest], weights_only)
    dist.broadcast(size, group=group, group_src=root)
    for part in (payload, size):
        parts = None if inputs is None else [part] * len(inputs)
        dist.scatter(torch.empty_like(part), parts, group=group, group_src=root)
    if inputs is not None:
        scatter_object_output_list[0] = _copy(inputs[rank], weights_only)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Group = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> None:
    """As in torch: send the sizes, then the objects."""
    peer = _peer(dst, group_dst, group, "destination")
    if _is_outside(group, "send_object_list"):
        return
    for part in _parts(object_list, weights_only):
        dist.send(part, group=group, group_dst=peer)
    if _mailbox is not None:
        _mailbox.send(dist.get_global_rank(_or_world(group), peer), object_list)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> int:
    """As in torch: receive the sizes, then the objects; without a mailbox the list is unchanged."""
    peer = _peer(src, group_src, group, "source")
    if _is_outside(group, "recv_object_list"):
        return -1
    if _mailbox is not None:
        source = dist.get_global_rank(_or_world(group), peer)
        object_list[:] = _mailbox.receive(source)
    sizes, payload = _parts(object_list, weights_only)
    dist.recv(sizes, group=group, group_src=peer)
    return dist.recv(payload, group=group, group_src=peer)


def _exchange(objects: list[Any], group: Group) -> list[list[Any]]:
    """What each rank of the group gives to this object collective; empty if that is not known."""
    if _known is None:
        return []
    received = _known.exchange_objects(_or_world(group), dump_objects(objects))
    return [pickle.loads(content) for content in received or ()]


def _root(rank: int | None, group_rank: int | None, group: Group) -> int:
    """The root as a rank of the group; rank 0 by default, as in torch."""
    if rank is None and group_rank is None:
        rank = 0
    return to_group_rank(_or_world(group), rank, group_rank)


def _peer(rank: int | None, group_rank: int | None, group: Group, role: str) -> int:
    peer = to_group_rank(_or_world(group), rank, group_rank)
    refuse_self(_or_world(group), peer, role)
    return peer


def _or_world(group: Group) -> dist.ProcessGroup:
    world = group or dist.group.WORLD
    assert world is not None
    return world


def _is_outside(group: Group, function: str) -> bool:
    """Whether this rank is not in the group; warns of that, as torch does."""
    is_outside = dist.get_rank(group) < 0
    if is_outside:
        warn_not_in_group(function)
    return is_outside


def _fill(objects: list[Any], obj: Any, group: Group, weights_only: bool) -> None:
    for index in range(dist.get_world_size(group)):
        objects[index] = _copy(obj, weights_only)


def _copy(obj: Any, weights_only: bool) -> Any:
    content = _dump(obj, weights_only)
    if weights_only:
        return torch.load(io.BytesIO(content), weights_only=True)
    return pickle.loads(content)


def _parts(objects: list[Any], weights_only: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensors that torch sends for objects: one of their sizes, and one of their bytes."""
    num_bytes = sum(len(_dump(obj, weights_only)) for obj in objects)
    return torch.zeros(len(objects), dtype=torch.long), torch.zeros(num_bytes, dtype=torch.uint8)


def _dump(obj: Any, weights_only: bool) -> bytes:
    """The bytes of an object as torch serializes it."""
    if not weights_only:
        try:
            return dump_objects(obj)
        except Exception:
            # torch.distributed.checkpoint sends the exception of this rank to the others.
            failure = obj[0] if isinstance(obj, tuple) and obj else None
            if isinstance(failure, BaseException):
                raise failure from None
            raise
    content = io.BytesIO()
    _save(obj, content)
    return content.getvalue()


_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
