"""A rank's memory as counters of a Chrome/Perfetto trace, one line for each kind of memory."""

from __future__ import annotations

from collections.abc import Iterator

from shardscope.record import MemoryKind, MemoryProfile
from shardscope.report.span_slices import Event

__all__ = ["make_counters"]

_STEP_US = 1  # between two allocations or releases, of which no clock was read


def make_counters(profile: MemoryProfile) -> Iterator[Event]:
    """The rank's name, and what was held of each kind at each sample."""
    name = {"name": f"rank {profile.rank}"}
    yield {"ph": "M", "pid": profile.rank, "tid": 0, "name": "process_name", "args": name}
    if not profile.samples:
        return
    first = profile.samples[0].order
    for sample in profile.samples:
        held = zip(MemoryKind, sample.num_bytes, strict=False)
        yield {
            "ph": "C",
            "pid": profile.rank,
            "tid": 0,
            "ts": (sample.order - first) * _STEP_US,
            "name": "memory (bytes; order of allocations, not time)",
            "cat": "memory",
            "args": {str(kind): num_bytes for kind, num_bytes in held},
        }
