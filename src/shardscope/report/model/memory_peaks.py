"""Which rank needs most memory: that whose figures are shown where one rank stands for all."""

from __future__ import annotations

from collections.abc import Sequence

from shardscope.record import MemoryProfile


def find_worst(profiles: Sequence[MemoryProfile]) -> MemoryProfile:
    """Return the profile of the rank that needs most; of equal ones, the lowest rank."""
    return min(profiles, key=lambda profile: (-most_bytes(profile), profile.rank))


def most_bytes(profile: MemoryProfile) -> int:
    """Return the peak over all steps, including the first if it was recorded."""
    return max(profile.peak_bytes, profile.first_peak_bytes or 0)
