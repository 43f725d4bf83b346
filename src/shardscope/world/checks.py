"""What a real process group refuses and torch's fake one lets pass: roots, peers, dtypes, sizes."""

from __future__ import annotations

import inspect
import traceback
from typing import Any, final

import torch.distributed as dist

from shardscope._torch.calls import CollectiveCall
from shardscope._torch.intercept import Issued
from shardscope._torch.simulated_group import ReceivedFrom, complete_work
from shardscope.record import CollectiveKind
from shardscope.world.refusal import refuse
from shardscope.world.sizes import check_sizes, exchanged_together

__all__ = ["CollectiveChecker", "check_call"]

_K = CollectiveKind
_ROLES = {_K.SEND: "receiver", _K.RECV: "sender"}
_BATCH_CODE = inspect.unwrap(dist.batch_isend_irecv).__code__


@final
class CollectiveChecker:
    """Refuses collectives that would fail for real; gives the rest a future that has a value."""

    def __init__(self) -> None:
        self._received: list[ReceivedFrom] = []

    def before(self, issued: Issued) -> None:
        """Check every collective that the op issues."""
        for single in issued.singles():
            check_call(single.read())

    def amend(self, issued: Issued, result: Any) -> Any:
        """Finished work, with a future of the outputs, for the fake group's, which has neither."""
        if not issued.op.startswith("c10d.") or result is None:
            return result
        call = issued.read()
        if call.kind is _K.RECV and call.peer is None:
            return self._receive(call)
        work = complete_work(call.outputs or [])
        return (result[0], work) if isinstance(result, tuple) else work

    def _receive(self, call: CollectiveCall) -> Any:
        """Someone must have sent what a rank receives from anyone: take the next rank."""
        work = ReceivedFrom((call.group.rank() + 1) % call.group.size())
        self._received.append(work)
        return work.boxed()


def check_call(call: CollectiveCall) -> None:
    """Raise CollectiveError if a real group would refuse `call`, or hang on it."""
    _check_peer(call)
    _check_dtypes(call)
    check_sizes(call)


def _check_peer(call: CollectiveCall) -> None:
    size = call.group.size()
    if call.kind is _K.RECV and size == 1:
        refuse(call, "this rank is alone in the group", "Receive only where someone can send.")
    role = _ROLES.get(call.kind, "root")
    if call.kind in _ROLES and call.peer == call.group.rank() and not _is_batched():
        refuse(
            call,
            f"this rank names itself as {role}",
            "Name another rank, or copy the tensor; only a batch may hold both ends.",
        )
    if call.peer is None or 0 <= call.peer < size:
        return
    refuse(
        call,
        f"rank {call.peer} is named as {role}, but the group has ranks 0 to {size - 1}",
        "Name a rank of the group; with a sub-group, torch.distributed takes global ranks.",
    )


def _is_batched() -> bool:
    """Whether sends and receives are issued together, so that NCCL lets a rank be both."""
    frames = traceback.walk_stack(None)
    return any(frame.f_code is _BATCH_CODE for frame, _ in frames)


def _check_dtypes(call: CollectiveCall) -> None:
    for tensors in exchanged_together(call):
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            refuse(call, f"its tensors mix {names}", "Cast them to one dtype first.")
