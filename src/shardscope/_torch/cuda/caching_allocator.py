"""A model of CUDA's caching allocator: the memory that a process takes of a GPU, and statistics."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any, final

CONTEXT_BYTES = 621 << 20
"""The size of CUDA's context on an H200, measured with torch 2.11; NCCL takes more."""

_ALIGNMENT = 512
_SMALL = 1 << 20  # requests up to here share small segments
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_MIN_OWN_SEGMENT = 10 << 20  # requests from here on get a segment of their own
_SEGMENT_ALIGNMENT = 2 << 20


@final
class Block:
    """A part of a segment, with its neighbours there."""

    __slots__ = ("address", "after", "before", "is_free", "is_small", "requested_bytes", "size")

    def __init__(self, size: int, address: int, *, is_small: bool) -> None:
        self.size = size
        self.requested_bytes = 0
        self.address = address  # newer segments have higher addresses
        self.is_small = is_small
        self.is_free = False
        self.before: Block | None = None
        self.after: Block | None = None


@final
class Statistic:
    """A number that grows and shrinks: its value, its peak, and all that was added and removed."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def add(self, amount: int) -> None:
        """Add an amount, or take one away if it is negative."""
        self.current += amount
        if amount < 0:
            self.freed -= amount
        else:
            self.allocated += amount
            if self.current > self.peak:
                self.peak = self.current

    def read(self) -> dict[str, int]:
        """The four numbers, by the names that torch gives them."""
        return {name: getattr(self, name) for name in ("current", "peak", "allocated", "freed")}


_COUNTED = (
    "allocation",
    "allocated_bytes",
    "requested_bytes",
    "segment",
    "reserved_bytes",
    "inactive_split",
    "inactive_split_bytes",
)
_POOLS = ("all", "small_pool", "large_pool")


@final
class CachingAllocator:
    """Models CUDA's caching allocator: counts allocated bytes and bytes reserved on the device."""

    def __init__(self) -> None:
        self._statistics = {name: {pool: Statistic() for pool in _POOLS} for name in _COUNTED}
        self._allocated = self._statistics["allocated_bytes"]["all"]
        self._reserved = self._statistics["reserved_bytes"]["all"]
        self._free: dict[bool, list[tuple[int, int]]] = {
            True: [],
            False: [],
        }  # by is_small: size, address
        self._free_blocks: dict[int, Block] = {}  # by address
        self.segments: list[tuple[int, int]] = []  # address and size of each that was reserved
        self._next_address = 0
        # By how much the running call changes the free parts of segments: their number and bytes.
        self._split_change = [0, 0]

    @property
    def allocated_bytes(self) -> int:
        """The bytes of blocks that are in use."""
        return self._allocated.current

    @property
    def reserved_bytes(self) -> int:
        """The bytes of all segments."""
        return self._reserved.current

    def allocate(self, num_bytes: int) -> Block:
        """The smallest free block that is large enough, split if the rest is worth keeping."""
        size = max(_ALIGNMENT, -(-num_bytes // _ALIGNMENT) * _ALIGNMENT)
        is_small = size <= _SMALL
        block = self._take(size, is_small) or self._reserve(size, is_small)
        rest = block.size - size
        if rest >= _ALIGNMENT if is_small else rest > _SMALL:
            self._split(block, size)
        block.requested_bytes = num_bytes
        self._count_use(block, 1)
        self._count_split(block)
        return block

    def release(self, block: Block) -> None:
        """Free a block, and merge it with free neighbours."""
        self._count_use(block, -1)
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self._remove(neighbour)
                block = _join(neighbour, block)
        self._add(block)
        self._count_split(block)

    def empty_cache(self) -> None:
        """Give segments back to the device in which nothing is in use."""
        for block in [block for block in self._free_blocks.values() if not _is_split(block)]:
            self._remove(block)
            self._count("segment", block, -1)
            self._count("reserved_bytes", block, -block.size)

    def reset_peaks(self) -> None:
        """Forget the peaks: from now on they are at least what is current."""
        for statistic in self._each_statistic():
            statistic.peak = statistic.current

    def reset_totals(self) -> None:
        """Forget how much was allocated and freed so far."""
        for statistic in self._each_statistic():
            statistic.allocated = statistic.freed = 0

    def read_statistics(self) -> dict[str, Any]:
        """The statistics as `torch.cuda.memory_stats_as_nested_dict` returns them."""
        statistics: dict[str, Any] = {
            name: {pool: statistic.read() for pool, statistic in pools.items()}
            for name, pools in self._statistics.items()
        }
        # A block that another stream uses stays active after its release; here no stream does.
        statistics["active"] = statistics["allocation"]
        statistics["active_bytes"] = statistics["allocated_bytes"]
        segments = self._statistics["segment"]["all"]
        return {
            **statistics,
            "max_split_size": -1,
            "num_alloc_retries": 0,
            "num_ooms": 0,
            "num_sync_all_streams": 0,
            "num_device_alloc": segments.allocated,
            "num_device_free": segments.freed,
            "oversize_allocations": Statistic().read(),
            "oversize_segments": Statistic().read(),
        }

    def _take(self, size: int, is_small: bool) -> Block | None:
        pool = self._free[is_small]
        index = bisect_left(pool, (size, -1))
        if index == len(pool):
            return None
        block = self._free_blocks[pool[index][1]]
        self._remove(block)
        return block

    def _reserve(self, size: int, is_small: bool) -> Block:
        if is_small:
            segment = _SMALL_SEGMENT
        elif size < _MIN_OWN_SEGMENT:
            segment = _LARGE_SEGMENT
        else:
            segment = -(-size // _SEGMENT_ALIGNMENT) * _SEGMENT_ALIGNMENT
        block = Block(segment, self._next_address, is_small=is_small)
        self._count("segment", block, 1)
        self._count("reserved_bytes", block, segment)
        self.segments.append((block.address, segment))
        self._next_address += segment
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.size - size, block.address + size, is_small=block.is_small)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._add(rest)

    def _add(self, block: Block) -> None:
        block.is_free = True
        self._free_blocks[block.address] = block
        insort(self._free[block.is_small], (block.size, block.address))
        self._note_split(block, 1)

    def _remove(self, block: Block) -> None:
        block.is_free = False
        pool = self._free[block.is_small]
        del pool[bisect_left(pool, (block.size, block.address))]
        del self._free_blocks[block.address]
        self._note_split(block, -1)

    def _note_split(self, block: Block, sign: int) -> None:
        if _is_split(block):
            self._split_change[0] += sign
            self._split_change[1] += sign * block.size

    def _count_split(self, block: Block) -> None:
        """Count how the free parts of segments have changed; as torch does, only the balance."""
        for name, change in zip(
            ("inactive_split", "inactive_split_bytes"), self._split_change, strict=True
        ):
            if change:
                self._count(name, block, change)
        self._split_change = [0, 0]

    def _count_use(self, block: Block, sign: int) -> None:
        self._count("allocation", block, sign)
        self._count("allocated_bytes", block, sign * block.size)
        self._count("requested_bytes", block, sign * block.requested_bytes)

    def _count(self, name: str, block: Block, amount: int) -> None:
        pools = self._statistics[name]
        pools["all"].add(amount)
        pools["small_pool" if block.is_small else "large_pool"].add(amount)

    def _each_statistic(self) -> list[Statistic]:
        return [statistic for pools in self._statistics.values() for statistic in pools.values()]


def _is_split(block: Block) -> bool:
    """Whether the block is a part of its segment, not all of it."""
    return block.before is not None or block.after is not None


def _join(block: Block, neighbour: Block) -> Block:
    """Merge two adjacent blocks."""
    first, second = (block, neighbour) if block.address < neighbour.address else (neighbour, block)
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first
