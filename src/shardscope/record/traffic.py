"""Totals of collectives, and which rank is the busiest: that which sends most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from shardscope.record.recording import Collective


class TrafficTotals(Struct, frozen=True):
    """Count and bytes of collectives."""

    count: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    wire_bytes: int = 0

    def __add__(self, totals: TrafficTotals) -> TrafficTotals:
        return TrafficTotals(
            self.count + totals.count,
            self.input_bytes + totals.input_bytes,
            self.output_bytes + totals.output_bytes,
            self.wire_bytes + totals.wire_bytes,
        )

    def __mul__(self, times: int) -> TrafficTotals:
        return TrafficTotals(
            self.count * times,
            self.input_bytes * times,
            self.output_bytes * times,
            self.wire_bytes * times,
        )


def sum_traffic(totals: Iterable[TrafficTotals]) -> TrafficTotals:
    """Sum totals."""
    return sum(totals, TrafficTotals())


def count_traffic(call: Collective) -> TrafficTotals:
    """Return the totals of one collective."""
    return TrafficTotals(1, call.input_bytes, call.output_bytes, call.wire_bytes)


def find_busiest(totals: Sequence[TrafficTotals]) -> int:
    """Return the position of the rank that sends most bytes.

    Of ranks that send the same, it is the one with most collectives, and of those the first.
    """
    return max(
        range(len(totals)), key=lambda index: (totals[index].wire_bytes, totals[index].count)
    )


def choose_busiest(totals: Iterable[TrafficTotals]) -> TrafficTotals:
    """Return the totals of the rank that sends most; zeros if there is no rank."""
    listed = list(totals)
    return listed[find_busiest(listed)] if listed else TrafficTotals()
