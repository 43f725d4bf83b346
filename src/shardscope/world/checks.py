"""Checks of roots, peers, dtypes and sizes that torch's fake process group does not make."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist

from shardscope._torch.collectives.events import CollectiveEvent
from shardscope._torch.collectives.schema import CollectiveCall
from shardscope._torch.mesh import group_label
from shardscope._torch.process_groups.simulated import ReceivedFrom, complete_work
from shardscope.errors import CollectiveError
from shardscope.record import CollectiveKind


def refuse(call: CollectiveCall, fact: str, remedy: str) -> NoReturn:
    """Raise CollectiveError for `call`, with what is wrong and what to do."""
    group = call.group
    description = group.group_desc if group.group_desc != "undefined" else group.group_name
    label = group_label(group) or description
    raise CollectiveError(
        f"{call.op} in group {label!r} ({group.size()} ranks): {fact}; a real process group would "
        f"fail or hang here, so the simulated one stops. {remedy}"
    )


_K = CollectiveKind


def check_sizes(call: CollectiveCall) -> None:
    """Raise CollectiveError if a real group could not exchange tensors of these sizes."""
    check = _CHECKS.get(call.kind)
    # Ops of these namespaces make their own checks.
    if check is not None and not call.op.startswith(("symm_mem.", "_dtensor.")):
        check(call, call.group.size())


def exchanged_together(call: CollectiveCall) -> list[list[torch.Tensor]]:
    """The tensors of each collective in the call: one list, or several if it is coalesced."""
    outputs = call.outputs or []
    if "coalesced" not in call.op:
        return [[*call.inputs, *outputs]]
    number = len(call.inputs)
    return [[tensor, *outputs[index::number]] for index, tensor in enumerate(call.inputs)]


def _check_gathered(call: CollectiveCall, size: int) -> None:
    if call.op == "c10d.allgather_coalesced_":
        for tensor, *shards in exchanged_together(call):
            _check_list(call, shards, tensor, size, "output")
    elif call.outputs is not None and not _is_list_form(call):
        _check_ratio(call, call.inputs, call.outputs, size, "output", "input")
    elif call.outputs is not None and len(call.inputs) == 1 and not _is_sender_only(call):
        _check_list(call, call.outputs, call.inputs[0], size, "output")


def _check_scattered(call: CollectiveCall, size: int) -> None:
    if call.outputs is None:
        for tensor in call.inputs:
            if tensor.dim() and tensor.shape[0] % size:
                refuse(
                    call,
                    f"dim 0 of its input has size {tensor.shape[0]}, "
                    f"which {size} ranks cannot divide evenly",
                    "Pad the tensor, or use a list of tensors of different sizes.",
                )
    elif _is_list_form(call):
        if call.inputs:
            _check_list(call, call.inputs, call.outputs[0], size, "input")
            if call.kind is _K.SCATTER:
                _check_even(call)
    else:
        _check_ratio(call, call.outputs, call.inputs, size, "input", "output")


def _is_sender_only(call: CollectiveCall) -> bool:
    """Whether the call is a gather on a rank that is not its root and has no output."""
    return call.kind is _K.GATHER and not call.outputs


def _is_list_form(call: CollectiveCall) -> bool:
    """Whether the inputs or outputs are a list with one tensor per rank."""
    return call.op in ("c10d.allgather_", "c10d.gather_", "c10d.reduce_scatter_", "c10d.scatter_")


def _check_ratio(
    call: CollectiveCall,
    small: list[torch.Tensor],
    large: list[torch.Tensor],
    size: int,
    large_name: str,
    small_name: str,
) -> None:
    for shard, full in zip(small, large, strict=False):
        if full.numel() != shard.numel() * size:
            refuse(
                call,
                f"its {large_name} has {full.numel()} elements, but {size} ranks × "
                f"{shard.numel()} of the {small_name} make {shard.numel() * size}",
                f"Allocate the {large_name} with {shard.numel() * size} elements.",
            )


def _check_list(
    call: CollectiveCall, shards: list[torch.Tensor], tensor: torch.Tensor, size: int, side: str
) -> None:
    if len(shards) != size:
        refuse(
            call,
            f"its {side} list has {len(shards)} tensors for {size} ranks",
            "Give one tensor per rank of the group.",
        )
    own = shards[call.group.rank()]
    if own.numel() != tensor.numel():
        refuse(
            call,
            f"this rank's tensor in the {side} list has {own.numel()} elements "
            f"and the tensor it stands for has {tensor.numel()}",
            "Make the two the same size.",
        )


def _check_even(call: CollectiveCall) -> None:
    sizes = sorted({tensor.numel() for tensor in call.inputs})
    if len(sizes) > 1:
        refuse(
            call,
            f"the tensors in its input list have from {sizes[0]} to {sizes[-1]} elements",
            "Scatter tensors of one size; pad the smaller ones.",
        )


def _check_exchanged(call: CollectiveCall, size: int) -> None:
    if call.op == "c10d.alltoall_":
        sent, received = _count_listed(call, size)
    else:
        sent, received = _count_split(call, size)
    own = call.group.rank()
    if sent[own] != received[own]:
        refuse(
            call,
            f"this rank sends itself {sent[own]} elements and expects {received[own]} from itself",
            "Make its own part of the input and of the output the same size.",
        )


def _count_listed(call: CollectiveCall, size: int) -> tuple[list[int], list[int]]:
    """The number of elements sent to each rank, and received from each."""
    outputs = call.outputs or []
    for side, tensors in (("input", call.inputs), ("output", outputs)):
        if len(tensors) != size:
            refuse(
                call,
                f"its {side} list has {len(tensors)} tensors for {size} ranks",
                "Give one tensor per rank of the group.",
            )
    return [tensor.numel() for tensor in call.inputs], [tensor.numel() for tensor in outputs]


def _count_split(call: CollectiveCall, size: int) -> tuple[list[int], list[int]]:
    """The number of elements sent to each rank, and received from each."""
    sent = call.inputs[0]
    input_rows = _check_splits(call, call.input_splits, sent, size, "input")
    if call.outputs:
        received = call.outputs[0]
        output_rows = _check_splits(call, call.output_splits, received, size, "output")
    else:
        received = sent
        output_rows = _check_num_splits(call, call.output_splits, size, "output") or input_rows
    return (
        [rows * _row_size(sent) for rows in input_rows],
        [rows * _row_size(received) for rows in output_rows],
    )


def _check_splits(
    call: CollectiveCall, splits: Sequence[int], tensor: torch.Tensor, size: int, side: str
) -> list[int]:
    """The number of rows of `tensor` for each rank."""
    if not tensor.dim():
        refuse(call, f"its {side} has no dims", "Give a tensor whose dim 0 can be split.")
    length = tensor.shape[0]
    if not splits and length % size:
        refuse(
            call,
            f"dim 0 of its {side} has size {length}, which {size} ranks cannot divide evenly",
            "Give split sizes, one per rank.",
        )
    rows = _check_num_splits(call, splits, size, side)
    if rows and sum(rows) != length:
        refuse(
            call,
            f"its {side} split sizes sum to {sum(rows)}, and dim 0 has size {length}",
            "Give split sizes that sum to the size of dim 0.",
        )
    return rows or [length // size] * size


def _check_num_splits(
    call: CollectiveCall, splits: Sequence[int], size: int, side: str
) -> list[int]:
    if splits and len(splits) != size:
        refuse(
            call,
            f"it has {len(splits)} {side} split sizes for {size} ranks",
            "Give one split size per rank of the group.",
        )
    if any(rows < 0 for rows in splits):
        refuse(
            call,
            f"its {side} split sizes include {min(splits)}",
            "Split sizes are numbers of rows, zero or more.",
        )
    return list(splits)


def _row_size(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[1:])


_CHECKS: dict[CollectiveKind, Callable[[CollectiveCall, int], None]] = {
    _K.ALL_GATHER: _check_gathered,
    _K.GATHER: _check_gathered,
    _K.REDUCE_SCATTER: _check_scattered,
    _K.SCATTER: _check_scattered,
    _K.ALL_TO_ALL: _check_exchanged,
}


_ROLES = {_K.SEND: "receiver", _K.RECV: "sender"}
_BATCH_CODE = inspect.unwrap(dist.batch_isend_irecv).__code__


@final
class CollectiveChecker:
    """Refuses collectives that a real group would refuse; completes the work of all others."""

    def __init__(self) -> None:
        self._received: list[ReceivedFrom] = []

    def before(self, event: CollectiveEvent) -> None:
        """Check every collective that the op issues."""
        for single in event.singles():
            check_call(single.read())

    def amend(self, event: CollectiveEvent, result: Any) -> Any:
        """Replace the fake group's work by completed work with a future of the outputs."""
        if not event.op.startswith("c10d.") or result is None:
            return result
        call = event.read()
        if call.kind is _K.RECV and call.peer is None:
            return self._receive(call)
        work = complete_work(call.outputs or [])
        return (result[0], work) if isinstance(result, tuple) else work

    def _receive(self, call: CollectiveCall) -> Any:
        """A receive from any rank needs a sender: report the next rank."""
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
        refuse(call, "this rank is alone in the group", "Receive only in groups with another rank.")
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
    """Whether the call is part of a batch, in which NCCL lets a rank send to itself."""
    frames = traceback.walk_stack(None)
    return any(frame.f_code is _BATCH_CODE for frame, _ in frames)


def _check_dtypes(call: CollectiveCall) -> None:
    for tensors in exchanged_together(call):
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            refuse(call, f"its tensors mix {names}", "Cast them to one dtype first.")
