"""The bytes of a collective: its inputs, its outputs, and what a ring algorithm sends.

A view counts with its own size: a 32-byte slice of a 4 MiB storage is 32 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import torch

from shardscope._torch.collectives.events import CollectiveEvent
from shardscope._torch.collectives.schema import num_bytes, reduce_op_name, tensors_in
from shardscope.comm.groups import Membership
from shardscope.record import CollectiveKind
from shardscope.record.base import wire_bytes

_K = CollectiveKind


@final
class Payload:
    """Sizes, dtype and peer of a collective on this rank, without references to tensors."""

    __slots__ = (
        "_dtype",
        "_output_bytes",
        "_peer",
        "_reduce_op",
        "_splits",
        "group",
        "input_bytes",
        "kind",
        "num_tensors",
        "op",
    )

    def __init__(
        self,
        event: CollectiveEvent,
        *,
        group: Membership,
        reduction: Any = None,
    ) -> None:
        """`reduction` is the reduce op that the Python caller passed, if known.

        Keeping a reference to a boxed process group or reduce op slows every later collective, and
        reading the name of a boxed reduce op is slow, so neither is kept and the latter is avoided.
        """
        layout, args = event.layout, event.args
        self.op = event.op
        self.kind = layout.kind
        self.group = group
        inputs: Any = () if layout.inputs is None else args[layout.inputs]
        outputs = event.out if layout.outputs is None else args[layout.outputs]
        num_args = len(args)
        reduce_op, peer, splits = layout.reduce_op, layout.peer, layout.input_splits
        self._reduce_op = None
        if reduce_op is not None and reduce_op < num_args:
            boxed = args[reduce_op]
            is_name = isinstance(boxed, str)
            self._reduce_op = boxed if is_name else reduction or reduce_op_name(boxed)
        self._peer = None if peer is None or peer >= num_args else args[peer]
        self._splits: Sequence[int] | None = None if splits is None else args[splits]
        if layout.kind is _K.ALL_TO_ALL and isinstance(inputs, list):
            self._splits = [num_bytes(tensor) for tensor in inputs]
        self.num_tensors, self.input_bytes, self._dtype = _sizes(inputs)
        if layout.factor is not None:
            self._multiply(inputs, args[layout.factor], _at(args, layout.dtype))
        self._output_bytes = None
        if outputs is None and splits is not None:
            self._output_bytes = _received(inputs, _at(args, layout.output_splits))
        elif layout.outputs is not None and layout.outputs == layout.inputs:
            self._output_bytes = self.input_bytes
        elif outputs is not None:
            num_outputs, self._output_bytes, dtype = _sizes(outputs)
            if not self.num_tensors:
                self.num_tensors, self._dtype = num_outputs, dtype

    def _multiply(self, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None) -> None:
        """Set the input size to that of the matrix product `a @ b`, which is communicated."""
        self._dtype = dtype or a.dtype
        self.input_bytes = a.numel() // a.shape[-1] * b.shape[-1] * self._dtype.itemsize

    @property
    def dtype(self) -> str:
        """The dtype's name, without `torch.`"""
        return "" if self._dtype is None else str(self._dtype).removeprefix("torch.")

    @property
    def reduce_op(self) -> str | None:
        """`sum`, `avg`, …"""
        return reduce_op_name(self._reduce_op)

    @property
    def output_bytes(self) -> int:
        """Size of the output on this rank; computed if the op allocates its output."""
        if self._output_bytes is not None:
            return self._output_bytes
        if self.kind is _K.ALL_GATHER:
            return self.input_bytes * self.group.num_ranks
        if self.kind is _K.REDUCE_SCATTER:
            return self.input_bytes // self.group.num_ranks
        return 0 if self.kind is _K.SEND else self.input_bytes

    @property
    def wire_bytes(self) -> int:
        """What this rank sends with a ring algorithm."""
        if self.kind is _K.ALL_TO_ALL and self._splits:
            own_share = self._splits[self.group.own_rank] / max(1, sum(self._splits))
            return round(self.input_bytes * (1 - own_share))
        return wire_bytes(self.kind, self.input_bytes, self.output_bytes, self.group.num_ranks)

    @property
    def global_peer(self) -> int | None:
        """The global rank of the root, sender or receiver."""
        return None if self._peer is None else self.group.global_rank(self._peer)


def _at(args: Sequence[Any], position: int | None) -> Any:
    return None if position is None or position >= len(args) else args[position]


def _received(rows: torch.Tensor, splits: Sequence[int] | None) -> int | None:
    """Bytes received by an all-to-all with uneven splits; None if the splits are even."""
    return sum(splits) * math.prod(rows.shape[1:]) * rows.element_size() if splits else None


def _sizes(value: Any) -> tuple[int, int, torch.dtype | None]:
    """The number of tensors, their bytes, and the dtype of the first."""
    if isinstance(value, torch.Tensor):
        return 1, num_bytes(value), value.dtype
    tensors = tensors_in(value)
    if not tensors:
        return 0, 0, None
    return len(tensors), sum(num_bytes(tensor) for tensor in tensors), tensors[0].dtype
