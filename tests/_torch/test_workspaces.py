"""Estimated workspaces of kernels against allocations recorded on an H200 (torch 2.11)."""

from __future__ import annotations

import pytest
import torch

from shardscope._torch.cuda.workspaces import workspace_bytes

aten = torch.ops.aten
BF16 = torch.bfloat16


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("shape", "num_key_heads", "num_keys", "recorded"),
    [
        ((4, 16, 2048, 128), 16, 2048, 67_633_408),
        ((4, 16, 1000, 96), 16, 1000, 24_832_256),
        ((4, 16, 2048, 128), 4, 2048, 134_742_272),  # grouped queries
        ((2, 8, 512, 64), 8, 1024, 2_130_176),
        ((2, 8, 1024, 256), 8, 1024, 16_843_008),
    ],
)
def test_attention_backward(
    shape: tuple[int, ...], num_key_heads: int, num_keys: int, recorded: int
) -> None:
    query = empty(*shape)
    key = empty(shape[0], num_key_heads, num_keys, shape[3])
    op = aten._scaled_dot_product_cudnn_attention_backward.default
    assert workspace_bytes(op, (query, query, key, key)) == recorded


def test_attention_backward_in_fp32() -> None:
    query = empty(4, 16, 1024, 96, dtype=torch.float32)
    op = aten._scaled_dot_product_efficient_attention_backward.default
    recorded = 25_165_824 + 262_144 + 33_570_816  # a copy of the gradient, sums, accumulators
    assert workspace_bytes(op, (query, query, query, query)) == recorded


@pytest.mark.parametrize(
    ("rows", "columns", "recorded"), [(8192, 2048, 134_217_728), (64, 2048, 0), (8192, 2047, 0)]
)
def test_sums_over_rows(rows: int, columns: int, recorded: int) -> None:
    assert workspace_bytes(aten.sum.dim_IntList, (empty(rows, columns), [0], True)) == recorded


def test_sums_of_anything_else_take_nothing() -> None:
    for dims in ([1], [0, 1], [], None):
        assert workspace_bytes(aten.sum.dim_IntList, (empty(8192, 2048), dims)) == 0
    assert workspace_bytes(aten.sum.dim_IntList, (empty(2048, 8192).t(), [0])) == 0


@pytest.mark.parametrize(
    ("count", "width", "recorded"),
    [(512, 2048, 0), (8192, 2048, 73_818_112 + 72_088 + 5 * 65_536)],
)
def test_embedding_backward(count: int, width: int, recorded: int) -> None:
    args = (empty(count, width), empty(count, dtype=torch.int64), 32_000, -1, False)
    assert workspace_bytes(aten.embedding_dense_backward.default, args) == recorded


def test_matrices_neither_row_major_nor_column_major_are_copied() -> None:
    rows, spread = empty(64, 32), empty(64, 1).expand(64, 32)
    assert workspace_bytes(aten.mm.default, (rows.t(), rows)) == 0
    assert workspace_bytes(aten.mm.default, (rows.t(), spread)) == 64 * 32 * 2


def test_convolutions_copy_their_tensors_unless_channels_last() -> None:
    image, weight = empty(32, 64, 56, 56), empty(128, 64, 3, 3)
    rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    num_bytes = workspace_bytes(aten.convolution.default, (image, weight, *rest))
    assert num_bytes == pytest.approx(38_682_771, rel=0.001)
    channels_last = image.contiguous(memory_format=torch.channels_last)
    assert workspace_bytes(aten.convolution.default, (channels_last, weight, *rest)) == 0
    grad = empty(32, 128, 56, 56)
    num_bytes = workspace_bytes(aten.convolution_backward.default, (grad, image, weight))
    assert num_bytes == pytest.approx(42_517_159, rel=0.02)


def test_ops_that_are_not_listed_take_nothing() -> None:
    assert workspace_bytes(aten.add.Tensor, (empty(4), empty(4))) == 0


def test_a_sum_of_a_scalar_takes_nothing() -> None:
    assert workspace_bytes(torch.ops.aten.sum.dim_IntList, (torch.ones(()), [0])) == 0
