"""What a real process group refuses and torch's fake one lets pass: roots, peers, dtypes, sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from shardscope._torch.calls import CollectiveCall
from shardscope._torch.intercept import Issued
from shardscope._torch.simulated_group import complete_work
from shardscope.errors import CollectiveError
from shardscope.record import CollectiveKind

__all__ = ["CollectiveChecker", "check_call"]

_K = CollectiveKind


class CollectiveChecker:
    """Refuses collectives that would fail for real, and gives the rest a future that has a value."""

    def before(self, issued: Issued) -> None:
        """Check every collective that the op issues."""
        for single in issued.singles():
            check_call(single.read())

    def amend(self, issued: Issued, result: Any) -> Any:
        """Put a future with the outputs where the fake group's has None."""
        if not issued.op.startswith("c10d.") or issued.layout.outputs is None:
            return result
        outputs = issued.read().outputs
        if not outputs or result is None:
            return result
        work = complete_work(outputs)
        return (result[0], work) if isinstance(result, tuple) else work


def check_call(call: CollectiveCall) -> None:
    """Raise CollectiveError if a real group would refuse `call`, or hang on it."""
    _check_peer(call)
    _check_dtypes(call)
    check = _SIZE_CHECKS.get(call.kind)
    if check is not None:
        check(call, call.group.size())


def _check_peer(call: CollectiveCall) -> None:
    size = call.group.size()
    if call.peer is None or 0 <= call.peer < size:
        return
    role = {_K.SEND: "receiver", _K.RECV: "sender"}.get(call.kind, "root")
    _refuse(
        call,
        f"rank {call.peer} is named as {role}, but the group has ranks 0 to {size - 1}",
        "Name a rank of the group; with a sub-group, torch.distributed takes global ranks.",
    )


def _check_dtypes(call: CollectiveCall) -> None:
    dtypes = {tensor.dtype for tensor in (*call.inputs, *(call.outputs or ()))}
    if len(dtypes) > 1 and not _is_coalesced(call):
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        _refuse(call, f"its tensors mix {names}", "Cast them to one dtype first.")


def _is_coalesced(call: CollectiveCall) -> bool:
    return "coalesced" in call.op


def _check_gathered(call: CollectiveCall, size: int) -> None:
    if call.outputs is not None and not _is_list_form(call):
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
    if call.op == "c10d.alltoall_":
        for side, tensors in (("input", call.inputs), ("output", call.outputs or [])):
            if len(tensors) != size:
                _refuse(
                    call,
                    f"its {side} list has {len(tensors)} tensors for {size} ranks",
                    "Give one tensor per rank of the group.",
                )
        return
    if call.op.startswith(("symm_mem.", "_dtensor.")):
        return
    _check_splits(call, call.input_splits, call.inputs[0], size, "input")
    if call.outputs:
        _check_splits(call, call.output_splits, call.outputs[0], size, "output")


def _check_splits(
    call: CollectiveCall, splits: Any, tensor: torch.Tensor, size: int, side: str
) -> None:
    length = tensor.shape[0] if tensor.dim() else 0
    if not splits and length % size:
        _refuse(
            call,
            f"dim 0 of its {side} has size {length}, which {size} ranks cannot share evenly",
            "Give split sizes, one per rank.",
        )
    if splits and (len(splits) != size or sum(splits) != length):
        _refuse(
            call,
            f"its {side} split sizes are {len(splits)} numbers that sum to {sum(splits)}, "
            f"for {size} ranks and a dim 0 of size {length}",
            "Give one split per rank, summing to the size of dim 0.",
        )


_SIZE_CHECKS: dict[CollectiveKind, Callable[[CollectiveCall, int], None]] = {
    _K.ALL_GATHER: _check_gathered,
    _K.GATHER: _check_gathered,
    _K.REDUCE_SCATTER: _check_scattered,
    _K.SCATTER: _check_scattered,
    _K.ALL_TO_ALL: _check_exchanged,
}


def _refuse(call: CollectiveCall, fact: str, remedy: str) -> NoReturn:
    group = call.group
    label = group.group_desc if group.group_desc != "undefined" else group.group_name
    raise CollectiveError(
        f"{call.op} in group {label!r} ({group.size()} ranks): {fact}; a real process group would "
        f"fail or hang here, so the simulated one stops. {remedy}"
    )
