"""The schemas of collective ops, and their arguments as a `CollectiveCall`.

Ops differ in where they have the group, the tensors and the root: `OPS` has an `OpLayout` for each.
A functional all-gather reaches c10d as `allgather_into_tensor_coalesced_`; tensors come as a single
tensor, a list, or a list of lists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from shardscope._torch.private import find_name, is_missing
from shardscope.record import CollectiveKind

_resolve_process_group = find_name(
    "torch.distributed.distributed_c10d._resolve_process_group",
    "find the group that a functional collective names",
)
_all_op_names = find_name("torch._C._dispatch_get_all_op_names", "list the ops that communicate")


@dataclass(frozen=True, slots=True)
class OpLayout:
    """The kind of a collective op, and the positions of its group, tensors, … among its arguments.

    An op with a `factor` communicates the matrix product of its input and that argument.
    """

    kind: CollectiveKind
    group: int
    inputs: int | None = None
    outputs: int | None = None
    reduce_op: int | None = None
    peer: int | None = None
    output_splits: int | None = None
    input_splits: int | None = None
    factor: int | None = None
    dtype: int | None = None


@dataclass(slots=True)
class CollectiveCall:
    """A collective about to be issued. `peer` is a rank of the group, not of the world.

    `outputs` is None if the op allocates them (functional collectives).
    """

    op: str
    kind: CollectiveKind
    group: dist.ProcessGroup
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor] | None
    peer: int | None = None
    input_splits: Sequence[int] = ()
    output_splits: Sequence[int] = ()


_K = CollectiveKind

_C10D = {
    "allreduce_": OpLayout(_K.ALL_REDUCE, 1, 0, 0, reduce_op=2),
    "allreduce_coalesced_": OpLayout(_K.ALL_REDUCE, 1, 0, 0, reduce_op=2),
    "_allgather_base_": OpLayout(_K.ALL_GATHER, 2, 1, 0),
    "allgather_": OpLayout(_K.ALL_GATHER, 2, 1, 0),
    "allgather_coalesced_": OpLayout(_K.ALL_GATHER, 2, 1, 0),
    "allgather_into_tensor_coalesced_": OpLayout(_K.ALL_GATHER, 2, 1, 0),
    "_reduce_scatter_base_": OpLayout(_K.REDUCE_SCATTER, 2, 1, 0, reduce_op=3),
    "reduce_scatter_": OpLayout(_K.REDUCE_SCATTER, 2, 1, 0, reduce_op=3),
    "reduce_scatter_tensor_coalesced_": OpLayout(_K.REDUCE_SCATTER, 2, 1, 0, reduce_op=3),
    "alltoall_": OpLayout(_K.ALL_TO_ALL, 2, 1, 0),
    "alltoall_base_": OpLayout(_K.ALL_TO_ALL, 2, 1, 0, output_splits=3, input_splits=4),
    "barrier": OpLayout(_K.BARRIER, 1),
    "monitored_barrier_": OpLayout(_K.BARRIER, 1),
    "broadcast_": OpLayout(_K.BROADCAST, 1, 0, 0, peer=2),
    "reduce_": OpLayout(_K.REDUCE, 1, 0, 0, reduce_op=2, peer=3),
    "gather_": OpLayout(_K.GATHER, 2, 1, 0, peer=3),
    "gather_into_tensor_": OpLayout(_K.GATHER, 2, 1, 0, peer=3),
    "scatter_": OpLayout(_K.SCATTER, 2, 1, 0, peer=3),
    "send": OpLayout(_K.SEND, 1, inputs=0, peer=2),
    "recv_": OpLayout(_K.RECV, 1, outputs=0, peer=2),
    "recv_any_source_": OpLayout(_K.RECV, 1, outputs=0),
}

_ALL_TO_ALL_SINGLE = OpLayout(_K.ALL_TO_ALL, 3, 0, output_splits=1, input_splits=2)

BATCH = OpLayout(_K.SEND, 4)
"""The layout of an op that issues several sends and receives; see `split_batch`."""

UNREAD = OpLayout(_K.SEND, 0)
"""The layout of an op that communicates and whose arguments are not understood."""

_FUNCTIONAL = {
    "all_reduce": OpLayout(_K.ALL_REDUCE, 2, 0, reduce_op=1),
    "all_reduce_": OpLayout(_K.ALL_REDUCE, 2, 0, reduce_op=1),
    "all_reduce_coalesced": OpLayout(_K.ALL_REDUCE, 2, 0, reduce_op=1),
    "all_reduce_coalesced_": OpLayout(_K.ALL_REDUCE, 2, 0, reduce_op=1),
    "all_gather_into_tensor": OpLayout(_K.ALL_GATHER, 2, 0),
    "all_gather_into_tensor_out": OpLayout(_K.ALL_GATHER, 2, 0),
    "all_gather_into_tensor_coalesced": OpLayout(_K.ALL_GATHER, 2, 0),
    "reduce_scatter_tensor": OpLayout(_K.REDUCE_SCATTER, 3, 0, reduce_op=1),
    "reduce_scatter_tensor_out": OpLayout(_K.REDUCE_SCATTER, 3, 0, reduce_op=1),
    "reduce_scatter_tensor_coalesced": OpLayout(_K.REDUCE_SCATTER, 3, 0, reduce_op=1),
    "all_to_all_single": _ALL_TO_ALL_SINGLE,
    "broadcast": OpLayout(_K.BROADCAST, 2, 0, peer=1),
    "broadcast_": OpLayout(_K.BROADCAST, 2, 0, peer=1),
    "isend": OpLayout(_K.SEND, 3, inputs=0, peer=1),
    "irecv": OpLayout(_K.RECV, 3, outputs=0, peer=1),
    "batch_p2p_ops": BATCH,
}

_FUNCTIONAL_AUTOGRAD = {
    "all_gather_into_tensor": OpLayout(_K.ALL_GATHER, 2, 0),
    "reduce_scatter_tensor": OpLayout(_K.REDUCE_SCATTER, 3, 0, reduce_op=1),
    "all_to_all_single": _ALL_TO_ALL_SINGLE,
}

_SYMMETRIC_MEMORY = {
    "one_shot_all_reduce": OpLayout(_K.ALL_REDUCE, 2, 0, reduce_op=1),
    "one_shot_all_reduce_out": OpLayout(_K.ALL_REDUCE, 2, 0, 3, reduce_op=1),
    "one_shot_all_reduce_copy": OpLayout(_K.ALL_REDUCE, 3, 1, reduce_op=2),
    "one_shot_all_reduce_copy_out": OpLayout(_K.ALL_REDUCE, 3, 1, 4, reduce_op=2),
    "two_shot_all_reduce_": OpLayout(_K.ALL_REDUCE, 2, 0, reduce_op=1),
    "two_shot_all_reduce_out": OpLayout(_K.ALL_REDUCE, 2, 0, 3, reduce_op=1),
    "multimem_all_reduce_": OpLayout(_K.ALL_REDUCE, 2, 0, reduce_op=1),
    "multimem_one_shot_all_reduce": OpLayout(_K.ALL_REDUCE, 2, 0, reduce_op=1),
    "multimem_one_shot_all_reduce_out": OpLayout(_K.ALL_REDUCE, 2, 0, 3, reduce_op=1),
    "multimem_one_shot_reduce_out": OpLayout(_K.REDUCE, 3, 0, 4, reduce_op=1, peer=2),
    "multimem_all_gather_out": OpLayout(_K.ALL_GATHER, 1, 0, 2),
    "reduce_scatter_out": OpLayout(_K.REDUCE_SCATTER, 1, 0, 3),
    "all_to_all_vdev": OpLayout(_K.ALL_TO_ALL, 4, 0, 1),
    "all_to_all_vdev_2d": OpLayout(_K.ALL_TO_ALL, 4, 0, 1),
    "all_to_all_vdev_2d_offset": OpLayout(_K.ALL_TO_ALL, 4, 0, 1),
    "nccl_all_to_all_nd": OpLayout(_K.ALL_TO_ALL, 4, 0, 1),
    "nvshmem_all_to_all": OpLayout(_K.ALL_TO_ALL, 2, 0, 1),
    "nvshmem_broadcast": OpLayout(_K.BROADCAST, 2, 0, peer=1),
    "tile_reduce": OpLayout(_K.REDUCE, 3, 0, 1, reduce_op=4, peer=2),
    "multi_root_tile_reduce": OpLayout(_K.REDUCE, 3, 0, 1, reduce_op=4),
    "nccl_reduce_scatter_offset": OpLayout(_K.REDUCE_SCATTER, 2, 0, 1, reduce_op=6),
    "fused_all_gather_matmul": OpLayout(_K.ALL_GATHER, 3, 0),
    "fused_all_gather_scaled_matmul": OpLayout(_K.ALL_GATHER, 5, 0),
    "fused_matmul_reduce_scatter": OpLayout(_K.REDUCE_SCATTER, 4, 0, reduce_op=2, factor=1),
    "fused_scaled_matmul_reduce_scatter": OpLayout(
        _K.REDUCE_SCATTER, 7, 0, reduce_op=4, factor=1, dtype=11
    ),
    "_low_contention_all_gather": OpLayout(_K.ALL_GATHER, 1, 0),
    "_low_contention_all_gather_ce_multicast": OpLayout(_K.ALL_GATHER, 1, 0),
    "_low_contention_all_gather_ce_multicast_out": OpLayout(_K.ALL_GATHER, 1, 0, 2),
    "_low_contention_reduce_scatter": OpLayout(_K.REDUCE_SCATTER, 2, 0, reduce_op=1),
}

OPS: dict[str, dict[str, OpLayout]] = {
    "c10d": _C10D,
    "_c10d_functional": _FUNCTIONAL,
    "_c10d_functional_autograd": _FUNCTIONAL_AUTOGRAD,
    "_dtensor": {"shard_dim_alltoall": OpLayout(_K.ALL_TO_ALL, 3, 0)},
    "symm_mem": _SYMMETRIC_MEMORY,
}
"""The layouts of collective ops by namespace and name; no version of torch has all of them."""

LOCAL_OPS = {
    "c10d": {"check_for_nan"},
    "_c10d_functional": {"_wrap_tensor_autograd", "wait_tensor", "wait_tensors"},
    "_dtensor": {"mesh_get_process_group"},
    "symm_mem": {
        "_async_input_mm",
        "_rendezvous",
        "memset32_",
        "nccl_wait_for_signal",
        "nccl_wait_signal",
        "nvshmem_wait_for_signal",
        "stream_write_value32_",
    },
}
"""Ops of the same namespaces that do not communicate."""


@cache
def unread_ops(namespace: str) -> tuple[str, ...]:
    """Ops of a namespace in this torch that may communicate and are not in `OPS`.

    One-sided transfers, which name no group, and ops newer than this version of shardscope.
    """
    listed = OPS[namespace].keys() | LOCAL_OPS.get(namespace, set())
    return tuple(sorted(registered_ops(namespace) - listed))


def registered_ops(namespace: str) -> set[str]:
    """The names of all ops of a namespace that this torch has, without overloads."""
    names: list[str] = [] if is_missing(_all_op_names) else _all_op_names()
    prefix = f"{namespace}::"
    own = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
    return {name.split(".")[0] for name in own}


def read_call(op: str, layout: OpLayout, args: Sequence[Any], out: Any = None) -> CollectiveCall:
    """Read the arguments of `op` by its layout. `out` is the keyword of functional out-variants."""
    outputs = out if layout.outputs is None else args[layout.outputs]
    call = CollectiveCall(
        op=op,
        kind=layout.kind,
        group=process_group(args[layout.group]),
        inputs=[] if layout.inputs is None else tensors_in(args[layout.inputs]),
        outputs=None if outputs is None else tensors_in(outputs),
    )
    if layout.peer is not None:
        call.peer = int(args[layout.peer])
        if layout.kind is _K.GATHER and call.peer != call.group.rank():
            call.outputs = []  # torch makes an empty output on ranks other than the root
    if layout.input_splits is not None and layout.output_splits is not None:
        call.input_splits = args[layout.input_splits] or ()
        call.output_splits = args[layout.output_splits] or ()
    return call


def read_exchange(call: CollectiveCall) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The bytes that an all-to-all sends to each member of its group, and receives from each."""
    size = call.group.size()
    sent = _split_bytes(call.inputs, call.input_splits, size)
    if call.outputs is not None:
        received = _split_bytes(call.outputs, call.output_splits, size)
    else:
        received = _split_bytes(call.inputs, call.output_splits, size)
    return sent, received


def _split_bytes(
    tensors: Sequence[torch.Tensor], splits: Sequence[int], size: int
) -> tuple[int, ...]:
    if len(tensors) != 1:
        return tuple(num_bytes(tensor) for tensor in tensors)
    tensor = tensors[0]
    if splits:
        row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
        return tuple(rows * row_bytes for rows in splits)
    return (num_bytes(tensor) // size,) * size


def split_batch(args: Sequence[Any]) -> list[tuple[OpLayout, tuple[Any, ...]]]:
    """The layout and arguments of each send or receive in a functional batch."""
    names, peers, tags, tensors, group = args
    return [
        (_FUNCTIONAL[name], (tensor, peer, tag, group))
        for name, peer, tag, tensor in zip(names, peers, tags, tensors, strict=True)
    ]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of an argument: a tensor, a list of tensors, or a list of lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    if value and isinstance(value[0], torch.Tensor):
        return list(value)
    return [tensor for part in value for tensor in tensors_in(part)]


def num_bytes(tensor: torch.Tensor) -> int:
    """The size in bytes; for a sparse tensor, that of its indices and values."""
    try:
        return tensor.nbytes
    except RuntimeError:  # it is sparse
        is_coo = tensor.layout is torch.sparse_coo
        parts = (tensor._indices(), tensor._values()) if is_coo else (tensor.values(),)
        return sum(part.nbytes for part in parts)


def process_group(value: Any) -> dist.ProcessGroup:
    """The process group of an op's argument: a boxed group, a name, or the group itself."""
    if isinstance(value, torch.ScriptObject):
        return dist.ProcessGroup.unbox(value)
    group: dist.ProcessGroup = _resolve_process_group(value) if isinstance(value, str) else value
    return group


_RED_OP_TYPES: Mapping[str, Any] = dist.ReduceOp.RedOpType.__members__
_REDUCE_OPS = {int(op): name.lower() for name, op in _RED_OP_TYPES.items()}


# By the id of torch's own constants, which live as long as torch.
_REDUCE_CONSTANTS = {id(op): name.lower() for name, op in _RED_OP_TYPES.items()}
# Comparing is much faster than reading the number of an op.
_USUAL_REDUCTIONS = [(_RED_OP_TYPES[name], name.lower()) for name in ("SUM", "AVG")]


def reduce_op_name(value: Any) -> str | None:
    """`sum`, `avg`, … for a reduction in any of the forms that ops and Python functions take."""
    name = _REDUCE_CONSTANTS.get(id(value))
    if name is not None:
        return name
    if value is None or isinstance(value, str):
        return value and value.lower()
    if type(value) is dist.ReduceOp:
        for op, op_name in _USUAL_REDUCTIONS:
            if value == op:
                return op_name
    if isinstance(value, torch.ScriptObject):
        return _REDUCE_OPS.get(int(value.op()), "unknown")
    return _REDUCE_OPS.get(int(getattr(value, "op", value)), "unknown")
