"""Formats bytes, times, FLOPs and counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from shardscope.record.text import format_digits

NOT_RECORDED = "not recorded"
UNKNOWN = "–"
"""What a cell of a table has for a figure that was not recorded, where none would be a dot."""

_TIMES = (("ns", 1), ("µs", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000))
_FLOP_UNITS = ("", "k", "M", "G", "T", "P", "E")


def format_duration(ns: int) -> str:
    """`0 ns`, `950 ns`, `1.50 µs`, `12.3 ms`, `100 s`, `86,400 s`."""
    for unit, size in _TIMES[:-1]:
        if ns < 999.5 * size:
            return "0 ns" if ns == 0 else _format_time(ns / size, unit)
    return _format_time(ns / _TIMES[-1][1], _TIMES[-1][0])


def _format_time(value: float, unit: str) -> str:
    if unit == "ns" or value >= 99.95:
        return f"{value:,.0f} {unit}"
    return f"{value:.1f} {unit}" if value >= 9.995 else f"{value:.2f} {unit}"


def format_flops(flops: int) -> str:
    """Format FLOPs with decimal units: `0 FLOP`, `512 FLOP`, `1.50 GFLOP`, `240 TFLOP`."""
    value = float(flops)
    for unit in _FLOP_UNITS[:-1]:
        if value < 999.5:
            return f"{value:.0f} FLOP" if not unit else format_digits(value, f"{unit}FLOP")
        value /= 1000
    return format_digits(value, f"{_FLOP_UNITS[-1]}FLOP")


def format_count(count: int) -> str:
    """Format with thousands separators; a dot for zero, so that other counts stand out."""
    return f"{count:,}" if count else "·"


class Spread(NamedTuple):
    """Minimum and maximum of a value over ranks."""

    low: int
    high: int


def spread(values: Iterable[int]) -> Spread:
    """Return the spread over ranks with nonzero values: pipeline stages lack values of others."""
    present = [value for value in values if value] or [0]
    return Spread(min(present), max(present))


def sum_known(values: Iterable[int | None]) -> int | None:
    """Sum values; None if any is None or if there are none."""
    known = list(values)
    if not known or None in known:
        return None
    return sum(value for value in known if value is not None)


def format_spread(values: Spread, form: Callable[[int], str]) -> str:
    """Format the value if ranks agree, else `≤` and the maximum."""
    return form(values.high) if values.low == values.high else f"≤ {form(values.high)}"


def plural(count: int, noun: str, ending: str = "s") -> str:
    """`1 rank`, `1,024 ranks`."""
    return f"{count:,} {noun}{'' if count == 1 else ending}"
