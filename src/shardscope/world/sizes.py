"""Whether the tensors of a collective have the sizes and numbers that its kind asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from shardscope._torch.calls import CollectiveCall
from shardscope.record import CollectiveKind
from shardscope.world.refusal import refuse

__all__ = ["check_sizes", "exchanged_together"]

_K = CollectiveKind


def check_sizes(call: CollectiveCall) -> None:
    """Raise CollectiveError if a real group could not exchange tensors of these sizes."""
    check = _CHECKS.get(call.kind)
    # Ops of these namespaces have rules of their own, and check them.
    if check is not None and not call.op.startswith(("symm_mem.", "_dtensor.")):
        check(call, call.group.size())


def exchanged_together(call: CollectiveCall) -> list[list[torch.Tensor]]:
    """All tensors of the call; of one that stands for several, those of each."""
    outputs = call.outputs or []
    if "coalesced" not in call.op:
        return [[*call.inputs, *outputs]]
    number = len(call.inputs)
    return [[one, *outputs[index::number]] for index, one in enumerate(call.inputs)]


def _check_gathered(call: CollectiveCall, size: int) -> None:
    if call.op == "c10d.allgather_coalesced_":
        for one, *pieces in exchanged_together(call):
            _check_list(call, pieces, one, size, "output")
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
                    "Pad the tensor, or use a list of uneven pieces.",
                )
    elif _is_list_form(call):
        if call.inputs:
            _check_list(call, call.inputs, call.outputs[0], size, "input")
            if call.kind is _K.SCATTER:
                _check_even(call)
    else:
        _check_ratio(call, call.outputs, call.inputs, size, "input", "output")


def _is_sender_only(call: CollectiveCall) -> bool:
    """Whether the call is a gather on a rank that is not its root, which gets nothing."""
    return call.kind is _K.GATHER and not call.outputs


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
            refuse(
                call,
                f"its {large_name} has {many.numel()} elements, but {size} ranks × "
                f"{one.numel()} of the {small_name} make {one.numel() * size}",
                f"Allocate the {large_name} with {one.numel() * size} elements.",
            )


def _check_list(
    call: CollectiveCall, pieces: list[torch.Tensor], one: torch.Tensor, size: int, side: str
) -> None:
    if len(pieces) != size:
        refuse(
            call,
            f"its {side} list has {len(pieces)} tensors for {size} ranks",
            "Give one tensor per rank of the group.",
        )
    own = pieces[call.group.rank()]
    if own.numel() != one.numel():
        refuse(
            call,
            f"this rank's piece of the {side} list has {own.numel()} elements "
            f"and the tensor it stands for has {one.numel()}",
            "Make the two the same size.",
        )


def _check_even(call: CollectiveCall) -> None:
    sizes = sorted({tensor.numel() for tensor in call.inputs})
    if len(sizes) > 1:
        refuse(
            call,
            f"the pieces of its input list have from {sizes[0]} to {sizes[-1]} elements",
            "Scatter pieces of one size; pad the smaller ones.",
        )


def _check_exchanged(call: CollectiveCall, size: int) -> None:
    if call.op == "c10d.alltoall_":
        sent, received = _list_pieces(call, size)
    else:
        sent, received = _split_pieces(call, size)
    own = call.group.rank()
    if sent[own] != received[own]:
        refuse(
            call,
            f"this rank sends itself {sent[own]} elements and expects {received[own]} from itself",
            "Make its own piece of the input and of the output the same size.",
        )


def _list_pieces(call: CollectiveCall, size: int) -> tuple[list[int], list[int]]:
    """How many elements go to each rank, and come from each."""
    outputs = call.outputs or []
    for side, tensors in (("input", call.inputs), ("output", outputs)):
        if len(tensors) != size:
            refuse(
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
