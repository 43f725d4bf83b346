"""How many bytes a collective carries: what goes in, what comes out, what a ring sends.

Logical bytes: a 32-byte slice of a 4 MiB storage is 32 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import torch

from shardscope._torch.calls import num_bytes, reduce_op_name, tensors_in
from shardscope._torch.intercept import Issued
from shardscope.comm.groups import Membership
from shardscope.record import CollectiveKind

__all__ = ["Payload", "wire_bytes"]

_K = CollectiveKind


@final
class Payload:
    """What a collective carries on this rank. Keeps sizes, not tensors, and looks up later."""

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
        issued: Issued,
        *,
        group: Membership,
        asked: Any = None,
    ) -> None:
        """`asked` is the reduction as the caller in Python named it, where there is one.

        A boxed process group or reduction that is kept slows every later collective, and asking a
        boxed reduction for its name is slow too, so neither is kept and the second is avoided.
        """
        layout, args = issued.layout, issued.args
        self.op = issued.op
        self.kind = layout.kind
        self.group = group
        inputs: Any = () if layout.inputs is None else args[layout.inputs]
        outputs = issued.out if layout.outputs is None else args[layout.outputs]
        num_args = len(args)
        reduce_op, peer, splits = layout.reduce_op, layout.peer, layout.input_splits
        self._reduce_op = None
        if reduce_op is not None and reduce_op < num_args:
            boxed = args[reduce_op]
            is_name = isinstance(boxed, str)
            self._reduce_op = boxed if is_name else asked or reduce_op_name(boxed)
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
        """Carry the product of two matrices, not the first of them."""
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
        """What this rank gets out; implied where the op makes its own output."""
        if self._output_bytes is not None:
            return self._output_bytes
        if self.kind is _K.ALL_GATHER:
            return self.input_bytes * self.group.num_ranks
        if self.kind is _K.REDUCE_SCATTER:
            return self.input_bytes // self.group.num_ranks
        return 0 if self.kind is _K.SEND else self.input_bytes

    @property
    def wire_bytes(self) -> int:
        """What this rank sends if the group runs a ring."""
        if self.kind is _K.ALL_TO_ALL and self._splits:
            kept = self._splits[self.group.own_rank] / max(1, sum(self._splits))
            return round(self.input_bytes * (1 - kept))
        return wire_bytes(self.kind, self.input_bytes, self.output_bytes, self.group.num_ranks)

    @property
    def global_peer(self) -> int | None:
        """The root, sender or receiver as a rank of the world."""
        return None if self._peer is None else self.group.global_rank(self._peer)


def _at(args: Sequence[Any], position: int | None) -> Any:
    return None if position is None or position >= len(args) else args[position]


def _received(rows: torch.Tensor, splits: Sequence[int] | None) -> int | None:
    """What an exchange of uneven numbers of rows brings in; None if they are even."""
    return sum(splits) * math.prod(rows.shape[1:]) * rows.element_size() if splits else None


def _sizes(value: Any) -> tuple[int, int, torch.dtype | None]:
    """How many tensors, how many bytes, and of which dtype."""
    if isinstance(value, torch.Tensor):
        return 1, num_bytes(value), value.dtype
    tensors = tensors_in(value)
    if not tensors:
        return 0, 0, None
    return len(tensors), sum(num_bytes(tensor) for tensor in tensors), tensors[0].dtype


def wire_bytes(kind: CollectiveKind, input_bytes: int, output_bytes: int, num_ranks: int) -> int:
    """Bytes each rank sends if the group runs a ring, averaged over its ranks.

    The factors are those by which bus bandwidth is commonly quoted: 2(n-1)/n of the payload for an
    all-reduce, (n-1)/n of the whole for all-gather, reduce-scatter, scatter and all-to-all, all of
    it for a broadcast or a reduce. A receive and the root of a gather send nothing: their bytes are
    counted where they are sent.
    """
    others = (num_ranks - 1) / num_ranks
    if num_ranks == 1 or kind in (_K.RECV, _K.BARRIER):
        return 0
    if kind is _K.GATHER and output_bytes:
        return 0
    if kind is _K.ALL_REDUCE:
        return round(2 * others * input_bytes)
    if kind is _K.ALL_GATHER:
        return round(others * output_bytes)
    if kind in (_K.REDUCE_SCATTER, _K.ALL_TO_ALL, _K.SCATTER):
        return round(others * input_bytes)
    return input_bytes
