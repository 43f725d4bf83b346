"""CUDA's caching allocator, as torch runs it by default: which block an allocation gets.

What a GPU counts as allocated are blocks, not requests: a block that would leave less than a
mebibyte over is given whole. What it has to have are segments, from which blocks are cut.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import final

__all__ = ["Block", "CachingAllocator"]

_ALIGNMENT = 512
_SMALL = 1 << 20  # requests up to here share small segments
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_MIN_OWN_SEGMENT = 10 << 20  # requests from here on get a segment of their own
_SEGMENT_ALIGNMENT = 2 << 20


@final
class Block:
    """A piece of a segment, with its neighbours there."""

    __slots__ = ("after", "before", "is_free", "is_small", "number", "size")

    def __init__(self, size: int, number: int, *, is_small: bool) -> None:
        self.size = size
        self.number = number  # where it lies: segments by age, blocks by address
        self.is_small = is_small
        self.is_free = False
        self.before: Block | None = None
        self.after: Block | None = None


@final
class CachingAllocator:
    """Gives out blocks; knows what is given out and what it holds of the device."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # by size, number
        self._blocks: dict[int, Block] = {}  # free ones, by number
        self._next_address = 0

    def allocate(self, num_bytes: int) -> Block:
        """The smallest free block that is large enough, cut to size where that is worth it."""
        size = max(_ALIGNMENT, -(-num_bytes // _ALIGNMENT) * _ALIGNMENT)
        is_small = size <= _SMALL
        block = self._take(size, is_small) or self._reserve(size, is_small)
        rest = block.size - size
        if rest >= _ALIGNMENT if is_small else rest > _SMALL:
            self._split(block, size)
        self.allocated_bytes += block.size
        return block

    def release(self, block: Block) -> None:
        """Take a block back, and join it with free neighbours."""
        self.allocated_bytes -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self._remove(neighbour)
                block = _join(neighbour, block)
        self._add(block)

    def _take(self, size: int, is_small: bool) -> Block | None:
        pool = self._free[is_small]
        index = bisect_left(pool, (size, -1))
        if index == len(pool):
            return None
        block = self._blocks[pool[index][1]]
        self._remove(block)
        return block

    def _reserve(self, size: int, is_small: bool) -> Block:
        if is_small:
            segment = _SMALL_SEGMENT
        elif size < _MIN_OWN_SEGMENT:
            segment = _LARGE_SEGMENT
        else:
            segment = -(-size // _SEGMENT_ALIGNMENT) * _SEGMENT_ALIGNMENT
        self.reserved_bytes += segment
        block = Block(segment, self._next_address, is_small=is_small)
        self._next_address += segment
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.size - size, block.number + size, is_small=block.is_small)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._add(rest)

    def _add(self, block: Block) -> None:
        block.is_free = True
        self._blocks[block.number] = block
        insort(self._free[block.is_small], (block.size, block.number))

    def _remove(self, block: Block) -> None:
        block.is_free = False
        pool = self._free[block.is_small]
        del pool[bisect_left(pool, (block.size, block.number))]
        del self._blocks[block.number]


def _join(one: Block, other: Block) -> Block:
    """Two neighbours as one block."""
    first, second = (one, other) if one.number < other.number else (other, one)
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first
