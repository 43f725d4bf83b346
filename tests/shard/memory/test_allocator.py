"""Blocks and segments as CUDA's caching allocator gives them out."""

from __future__ import annotations

import random

import pytest

from shardscope._torch.cuda.caching_allocator import CachingAllocator

MIB = 1 << 20


@pytest.mark.parametrize(
    ("request_bytes", "block_bytes", "segment_bytes"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # a mebibyte is not worth cutting off
        (100 * MIB + 512, 100 * MIB + 512, 102 * MIB),
    ],
)
def test_requests_get_blocks_from_segments_of_the_right_size(
    request_bytes: int, block_bytes: int, segment_bytes: int
) -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(request_bytes)
    assert block.size == block_bytes
    assert allocator.allocated_bytes == block_bytes
    assert allocator.reserved_bytes == segment_bytes


def test_a_freed_block_is_used_again() -> None:
    allocator = CachingAllocator()
    for _ in range(5):
        allocator.release(allocator.allocate(30 * MIB))
    assert allocator.reserved_bytes == 30 * MIB
    assert allocator.allocated_bytes == 0


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    small, large = allocator.allocate(20 * MIB), allocator.allocate(40 * MIB)
    allocator.release(large)
    allocator.release(small)
    assert allocator.allocate(18 * MIB) is small


def test_the_rest_of_a_split_block_is_reused_and_merged_again() -> None:
    allocator = CachingAllocator()
    pieces = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved_bytes == 20 * MIB
    for piece in (pieces[1], pieces[3], pieces[0], pieces[2]):
        allocator.release(piece)
    assert allocator.allocate(20 * MIB).size == 20 * MIB
    assert allocator.reserved_bytes == 20 * MIB


def test_small_and_large_requests_share_no_segment() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(100))
    allocator.allocate(2 * MIB)
    assert allocator.reserved_bytes == 22 * MIB


def test_nothing_is_lost_in_a_long_run() -> None:
    chance, allocator, held = random.Random(0), CachingAllocator(), []
    for _ in range(5000):
        if held and chance.random() < 0.5:
            allocator.release(held.pop(chance.randrange(len(held))))
        else:
            held.append(allocator.allocate(int(2 ** chance.uniform(5, 26))))
        assert allocator.allocated_bytes == sum(block.size for block in held)
        assert allocator.allocated_bytes <= allocator.reserved_bytes
    for block in held:
        allocator.release(block)
    assert allocator.allocated_bytes == 0
