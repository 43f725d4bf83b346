"""What a real process group refuses and torch's fake one lets pass: roots, peers, dtypes, sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from shardscope._torch.calls import CollectiveCall
from shardscope._torch.intercept import Issued
from shardscope._torch.meshes import group_label
from shardscope._torch.simulated_group import ReceivedFrom, complete_work
from shardscope.errors import CollectiveError
from shardscope.record import CollectiveKind

__all__ = ["CollectiveChecker", "check_call"]

_K = CollectiveKind


class CollectiveChecker:
    """Refuses collectives that would fail for real; gives the rest a future that has a value."""

    def before(self, issued: Issued) -> None:
        """Check every collective that the op issues."""
        for single in issued.singles():
            check_call(single.read())

    def amend(self, issued: Issued, result: Any) -> Any:
        """Put a future with the outputs where the fake group's has None."""
        if not issued.op.startswith("c10d.") or issued.layout.outputs is None:
            return result
        call = issued.read()
        if not call.outputs or result is None:
            return result
        if call.kind is _K.RECV and call.peer is None:
            return self._receive(call)
        work = complete_work(call.outputs)
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
    check = _SIZE_CHECKS.get(call.kind)
    if check is not None:
        check(call, call.group.size())


def _check_peer(call: CollectiveCall) -> None:
    size = call.group.size()
    if call.kind is _K.RECV and size == 1:
        _refuse(call, "this rank is alone in the group", "Receive only where someone can send.")
    if call.peer is None or 0 <= call.peer < size:
        return
    role = {_K.SEND: "receiver", _K.RECV: "sender"}.get(call.kind, "root")
    _refuse(
        call,
        f"rank {call.peer} is named as {role}, but the group has ranks 0 to {size - 1}",
        "Name a rank of the group; with a sub-group, torch.distributed takes global ranks.",
    )


def _check_dtypes(call: CollectiveCall) -> None:
    for tensors in _exchanged_together(call):
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            _refuse(call, f"its tensors mix {names}", "Cast them to one dtype first.")


def _exchanged_together(call: CollectiveCall) -> list[list[torch.Tensor]]:
    """All tensors of the call; of one that stands for several, those of each."""
    outputs = call.outputs or []
    if "coalesced" not in call.op:
        return [[*call.inputs, *outputs]]
    number = len(call.inputs)
    return [[one, *outputs[index::number]] for index, one in enumerate(call.inputs)]


def _check_gathered(call: CollectiveCall, size: int) -> None:
    if call.op == "c10d.allgather_coalesced_":
        for one, *pieces in _exchanged_together(call):
            _check_list(call, pieces, one, size, "output")
    elif call.outputs is not None and not _is_list_form(call):
        _check_ratio(call, call.inputs, call.outputs, size, "output", "input")
    elif call.outputs is not None and call.outputs and len(call.inputs) == 1:
        _check_list(call, call.outputs, call.inputs[0], size, "output")


def _check_scattered(call: CollectiveCall, size: int) -> None:
    if call.outputs is None:
        for tensor in call.inputs:
            if tensor.dim() and tensor.shape[0] % size:
                _refuse(
                    call,
                    f"dim 0 of its input has size {tensor.shape[0]}, "
                    f"which {size} ranks cannot share evenly",
                    "Pad the tensor, or use a list of uneven pieces.",
                )
    elif _is_list_form(call):
        if call.inputs:
            _check_list(call, call.inputs, call.outputs[0], size, "input")
    else:
        _check_ratio(call, call.outputs, call.inputs, size, "input", "output")


def _is_list_form(call: CollectiveCall) -> bool:
    """Whether one side is a list with a tensor per rank, not one tensor for all."""
    return call.op in ("c10d.allgather_", "c10d.gather_", "c10d.reduce_scatter_", "c10d.scatter_")


def _check_ratio(
    call: CollectiveCall,
    small: list[torch.Tensor],
    large: list[torch.Tensor],
    size: int,
    large_name: str,
    small_name: str,
) -> None:
    for one, many in zip(small, large, strict=False):
        if many.numel() != one.numel() * size:
            _refuse(
                call,
                f"its {large_name} has {many.numel()} elements where {size} ranks × "
                f"{one.numel()} of the {small_name} make {one.numel() * size}",
                f"Allocate the {large_name} with {one.numel() * size} elements.",
            )


def _check_list(
    call: CollectiveCall, pieces: list[torch.Tensor], one: torch.Tensor, size: int, side: str
) -> None:
    if len(pieces) != size:
        _refuse(
            call,
            f"its {side} list has {len(pieces)} tensors for {size} ranks",
            "Give one tensor per rank of the group.",
        )
    own = pieces[call.group.rank()]
    if own.numel() != one.numel():
        _refuse(
            call,
            f"this rank's piece of the {side} list has {own.numel()} elements "
            f"and the tensor it stands for has {one.numel()}",
            "Make the two the same size.",
        )


def _check_exchanged(call: CollectiveCall, size: int) -> None:
    if call.op.startswith(("symm_mem.", "_dtensor.")):
        return
    if call.op == "c10d.alltoall_":
        sent, received = _list_pieces(call, size)
    else:
        sent, received = _split_pieces(call, size)
    own = call.group.rank()
    if sent[own] != received[own]:
        _refuse(
            call,
            f"this rank sends itself {sent[own]} elements and expects {received[own]} from itself",
            "Make its own piece of the input and of the output the same size.",
        )


def _list_pieces(call: CollectiveCall, size: int) -> tuple[list[int], list[int]]:
    """How many elements go to each rank, and come from each."""
    outputs = call.outputs or []
    for side, tensors in (("input", call.inputs), ("output", outputs)):
        if len(tensors) != size:
            _refuse(
                call,
                f"its {side} list has {len(tensors)} tensors for {size} ranks",
                "Give one tensor per rank of the group.",
            )
    return [tensor.numel() for tensor in call.inputs], [tensor.numel() for tensor in outputs]


def _split_pieces(call: CollectiveCall, size: int) -> tuple[list[int], list[int]]:
    """How many elements go to each rank, and come from each."""
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
    """How many rows of `tensor` are each rank's."""
    if not tensor.dim():
        _refuse(call, f"its {side} has no dims", "Give a tensor whose dim 0 can be split.")
    length = tensor.shape[0]
    if not splits and length % size:
        _refuse(
            call,
            f"dim 0 of its {side} has size {length}, which {size} ranks cannot share evenly",
            "Give split sizes, one per rank.",
        )
    rows = _check_num_splits(call, splits, size, side)
    if rows and sum(rows) != length:
        _refuse(
            call,
            f"its {side} split sizes sum to {sum(rows)}, and dim 0 has size {length}",
            "Give split sizes that sum to the size of dim 0.",
        )
    return rows or [length // size] * size


def _check_num_splits(
    call: CollectiveCall, splits: Sequence[int], size: int, side: str
) -> list[int]:
    if splits and len(splits) != size:
        _refuse(
            call,
            f"it has {len(splits)} {side} split sizes for {size} ranks",
            "Give one split size per rank of the group.",
        )
    if any(rows < 0 for rows in splits):
        _refuse(
            call,
            f"its {side} split sizes include {min(splits)}",
            "Split sizes are numbers of rows, zero or more.",
        )
    return list(splits)


_SIZE_CHECKS: dict[CollectiveKind, Callable[[CollectiveCall, int], None]] = {
    _K.ALL_GATHER: _check_gathered,
    _K.GATHER: _check_gathered,
    _K.REDUCE_SCATTER: _check_scattered,
    _K.SCATTER: _check_scattered,
    _K.ALL_TO_ALL: _check_exchanged,
}


def _refuse(call: CollectiveCall, fact: str, remedy: str) -> NoReturn:
    group = call.group
    description = group.group_desc if group.group_desc != "undefined" else group.group_name
    label = group_label(group) or description
    raise CollectiveError(
        f"{call.op} in group {label!r} ({group.size()} ranks): {fact}; a real process group would "
        f"fail or hang here, so the simulated one stops. {remedy}"
    )
