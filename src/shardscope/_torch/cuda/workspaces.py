"""Workspaces: memory that CUDA kernels allocate temporarily while they run.

Formulas fitted to allocations recorded on an H200 under torch 2.11, op by op. Ops without an entry
allocate nothing, or a negligible amount.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.private import find_name

CUBLAS_BYTES = 32 << 20
"""The workspace of a cuBLAS handle on Hopper."""

_aten = torch.ops.aten

MATRIX_OPS = {
    _aten.addbmm.default,
    _aten.addmm.default,
    _aten.addmv.default,
    _aten.baddbmm.default,
    _aten.bmm.default,
    _aten.mm.default,
    _aten.mv.default,
}

_NUM_MULTIPROCESSORS = 132  # of an H100 or H200
_THREADS_PER_MULTIPROCESSOR = 2048
_MAX_REDUCE_THREADS = 512
_WARP = 32
_VECTOR = 4


@final
class CublasHandles:
    """The handles of cuBLAS: each thread that multiplies matrices has one, with its workspace.

    Forward and backward run on two threads.
    """

    def __init__(self) -> None:
        self._has_forward = self._has_backward = False

    def create_for(self, op: Any) -> int:
        """The bytes of the handle that an op creates; 0 if it needs none, or its thread has one."""
        if op not in MATRIX_OPS:
            return 0
        if is_in_backward():
            is_new, self._has_backward = not self._has_backward, True
        else:
            is_new, self._has_forward = not self._has_forward, True
        return CUBLAS_BYTES if is_new else 0


def workspace_bytes(op: Any, args: Sequence[Any]) -> int:
    """The peak memory of the op's kernel, in bytes, beyond its inputs and outputs."""
    estimate = _ESTIMATES.get(op)
    return 0 if estimate is None else estimate(*args)


def _matrix_copies(*args: Any) -> int:
    """Copies of matrices that are neither row-major nor column-major, as cuBLAS requires."""
    matrices = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() >= 2]
    return sum(_num_bytes(matrix) for matrix in matrices if not _has_rows_or_columns(matrix))


def _has_rows_or_columns(matrix: torch.Tensor) -> bool:
    (rows, columns), (down, across) = matrix.shape[-2:], matrix.stride()[-2:]
    by_rows = across == 1 and down >= max(1, columns)
    by_columns = down == 1 and across >= max(1, rows)
    return by_rows or by_columns or matrix.numel() == 0


def _cudnn_attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *_: Any
) -> int:
    """Gradients of queries in fp32, a sum for each query, and copies of shared heads."""
    batch, num_heads, num_queries, head = query.shape
    sums = batch * num_heads * num_queries
    shared_head_copies = 0
    if key.shape[1] != num_heads:
        shared_head_copies = 2 * batch * num_heads * key.shape[2] * head * key.element_size()
    return sums * head * 4 + sums * 4 + 256 + shared_head_copies


def _efficient_attention_backward(grad: torch.Tensor, query: torch.Tensor, *_: Any) -> int:
    """The larger of fp32 products and accumulators, and a contiguous copy of the gradient."""
    batch, num_heads, num_queries, head = query.shape
    sums = batch * num_heads * num_queries
    copied = 0 if grad.transpose(1, 2).is_contiguous() else _num_bytes(grad)
    width = 64 * math.ceil(head / 64)
    return copied + sums * 4 + max(sums * head * 4, sums * width * 4 + 16384)


def _embedding_backward(
    grad: torch.Tensor, indices: torch.Tensor, num_weights: int, *_: Any
) -> int:
    """Sorted indices, and fp32 sums of the gradients with the same index."""
    count = indices.numel()
    if count <= 3072:
        return 0
    num_segments = count // 10 + min(count, num_weights)
    return num_segments * (grad.shape[-1] * 4 + 8) + 5 * count * 8


def _indexed_sum(_: torch.Tensor, indices: Sequence[Any], *rest: Any) -> int:
    is_summed = len(rest) > 1 and rest[1]
    counts = [index.numel() for index in indices if isinstance(index, torch.Tensor)]
    return 5 * 8 * max(counts, default=0) if is_summed else 0


def _sum_over_rows(x: torch.Tensor, dims: Sequence[int] | None = None, *_: Any) -> int:
    """Partial sums of the blocks that share a column, for a sum over all dims but the last ones."""
    if not dims or not x.dim() or not x.is_contiguous() or x.is_complex() or x.numel() == 0:
        return 0
    reduced = {dim % x.dim() for dim in dims}
    if reduced != set(range(len(reduced))) or len(reduced) == x.dim():
        return 0
    num_rows = math.prod(x.shape[: len(reduced)])
    return _partial_sums(num_rows, x.numel() // num_rows)


def _partial_sums(num_rows: int, num_columns: int) -> int:
    if num_columns % _VECTOR:
        return 0
    columns = num_columns // _VECTOR
    num_threads = _MAX_REDUCE_THREADS // _VECTOR
    wide = min(_power_of_two(columns, num_threads), _WARP)
    high = min(_power_of_two(num_rows, num_threads), num_threads // wide)
    wide = min(_power_of_two(columns, num_threads), num_threads // high)
    if num_rows < high * 16 and num_rows < 256:
        return 0  # each thread sums a column of its own
    per_thread = math.ceil(num_rows / high)
    grid = math.ceil(columns / wide)
    num_blocks = _NUM_MULTIPROCESSORS * (_THREADS_PER_MULTIPROCESSOR // (wide * high))
    if per_thread < 256 or grid > num_blocks:
        return 0
    shared = min(math.ceil(num_blocks / grid), math.ceil(per_thread / 16))
    shared = max(shared, math.ceil(per_thread / 256))
    return 4 * num_columns * shared * wide * _VECTOR if shared > 1 else 0


def _power_of_two(number: int, most: int) -> int:
    return most if number >= most else 1 << (max(1, number).bit_length() - 1)


def _convolution(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> int:
    """Channels-last copies of input, weight and output, unless they are channels-last already."""
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return 0
    output = _convolved_size(x, weight, *rest) * x.element_size()
    return _num_bytes(x) + _num_bytes(weight) + output


def _convolved_size(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> int:
    _, stride, padding, dilation, is_transposed = rest[:5]
    if is_transposed:
        return x.numel()
    sizes = [
        (size + 2 * pad - gap * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, gap in zip(
            x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=False
        )
    ]
    return int(x.shape[0] * weight.shape[0] * math.prod(sizes))


def _convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *_: Any
) -> int:
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return 0
    return _num_bytes(grad) + _num_bytes(x) + _num_bytes(weight) + (4 << 20)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _attention_backward(kind: str) -> Any:
    op = f"torch.ops.aten._scaled_dot_product_{kind}_attention_backward.default"
    return find_name(op, "count what CUDA's attention allocates")


_ESTIMATES: dict[Any, Callable[..., int]] = {
    **dict.fromkeys(MATRIX_OPS, _matrix_copies),
    _attention_backward("cudnn"): _cudnn_attention_backward,
    _attention_backward("efficient"): _efficient_attention_backward,
    _attention_backward("flash"): _cudnn_attention_backward,
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.index_put.default: _indexed_sum,
    _aten.index_put_.default: _indexed_sum,
    _aten.sum.dim_IntList: _sum_over_rows,
}
