"""`torch.cuda`'s functions about memory, answered by the model of CUDA's allocator."""

from __future__ import annotations

import os
from typing import Any

from shardscope._torch.cuda.caching_allocator import CachingAllocator
from shardscope._torch.cuda.host import host, read_index


def _read_allocator(device: Any) -> CachingAllocator:
    assert host.memory is not None
    return host.memory.read(read_index(device))


def read_nested(device: Any = None) -> dict[str, Any]:
    """Statistics by metric, pool and kind, as `memory_stats_as_nested_dict` returns them."""
    return _read_allocator(device).read_statistics()


def read_flat(device: Any = None) -> dict[str, int]:
    """Statistics by names such as "allocated_bytes.all.peak", in their alphabetic order."""
    return dict(sorted(_flatten("", read_nested(device))))


def _flatten(prefix: str, value: Any) -> list[tuple[str, int]]:
    if not isinstance(value, dict):
        return [(prefix, value)]
    dot = "." if prefix else ""
    return [pair for key, item in value.items() for pair in _flatten(f"{prefix}{dot}{key}", item)]


def read_allocated(device: Any = None) -> int:
    """The bytes of tensors and workspaces that are alive."""
    return _read_allocator(device).allocated_bytes


def read_reserved(device: Any = None) -> int:
    """The bytes that the allocator holds for them and for reuse."""
    return _read_allocator(device).reserved_bytes


def read_peak_allocated(device: Any = None) -> int:
    """The most allocated bytes since the start, or since the peak was reset."""
    return int(read_nested(device)["allocated_bytes"]["all"]["peak"])


def read_peak_reserved(device: Any = None) -> int:
    """The most reserved bytes since the start, or since the peak was reset."""
    return int(read_nested(device)["reserved_bytes"]["all"]["peak"])


def reset_peaks(device: Any = None) -> None:
    """Let the peaks begin at what is allocated now."""
    _read_allocator(device).reset_peaks()


def reset_totals(device: Any = None) -> None:
    """Let the sums of what was allocated and freed begin at 0."""
    _read_allocator(device).reset_totals()


def empty_cache() -> None:
    """Give back the segments in which nothing is alive, of all devices."""
    for index in range(host.num_devices):
        _read_allocator(index).empty_cache()


def read_used(device: Any = None) -> int:
    """The bytes of a device that are taken: reserved, and by CUDA itself."""
    assert host.memory is not None
    return host.memory.used_bytes(read_index(device))


def read_free_and_total(device: Any = None) -> tuple[int, int]:
    """The bytes of a device that are free, and all of them.

    A program that does not fit finds none free; it is not stopped.
    """
    total = host.gpu.total_memory
    return max(0, total - read_used(device)), total


def list_processes(device: Any = None) -> str:
    """This process and the memory that it takes, as torch prints it."""
    megabytes = read_used(device) / (1 << 20)
    used = f"process {os.getpid():>10d} uses {megabytes:>12.3f} MB GPU memory"
    return f"GPU:{read_index(device)}\n{used}"


def set_fraction(fraction: float, device: Any = None) -> None:
    """Remember a fraction of the memory; nothing is refused beyond it."""
    host.memory_fraction = float(fraction)
