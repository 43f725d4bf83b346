"""Whether a step fits, and what to change if it does not."""

from __future__ import annotations

from collections.abc import Iterator

from shardscope.record import Finding, MemoryProfile, Recording

__all__ = ["find_memory_problems"]


def find_memory_problems(profile: MemoryProfile, recording: Recording) -> Iterator[Finding]:
    return iter(())
