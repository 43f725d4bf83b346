"""Formats bytes, times, FLOPs and counts, and parses sizes in bytes, for all packages."""

from __future__ import annotations

import math
import re

NOT_RECORDED = "not recorded"
UNKNOWN = "–"
"""What a cell of a table has for a figure that was not recorded, where none would be a dot."""

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_SIZE_UNITS = ("TiB", "GiB", "MiB", "KiB")  # of sizes that users write
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_MAX_BYTES = 2**63 - 1
_TIMES = (("ns", 1), ("µs", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000))
_FLOP_UNITS = ("", "k", "M", "G", "T", "P", "E")


def format_bytes(num_bytes: int) -> str:
    """Format bytes with three digits: `0 B`, `512 B`, `1.50 KiB`, `12.3 MiB`, `224 GiB`."""
    value = float(num_bytes)
    for unit in _BYTE_UNITS[:-1]:
        if abs(value) < 999.5:
            return format_digits(value, unit)
        value /= 1024
    return format_digits(value, _BYTE_UNITS[-1])


def format_digits(value: float, unit: str) -> str:
    """Format with three digits and the unit: `1.50 KiB`, `12.3 MiB`; bytes have no fraction."""
    if unit == "B" or value >= 99.95:
        return f"{value:.0f} {unit}"
    return f"{value:.1f} {unit}" if value >= 9.995 else f"{value:.2f} {unit}"


def format_duration(ns: int) -> str:
    """Format a time: `0 ns`, `950 ns`, `1.50 µs`, `12.3 ms`, `100 s`, `86,400 s`."""
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


def plural(count: int, noun: str, ending: str = "s") -> str:
    """A count with its noun: `1 rank`, `1,024 ranks`."""
    return f"{count:,} {noun}{'' if count == 1 else ending}"


def describe_all(count: int, noun: str, verb: str, rest: str = "") -> str:
    """What all of them do: `All 9 tensors of Net agree`, `The only tensor of Net agrees`.

    `rest` follows the noun: "of Net".
    """
    named = f"{rest} {verb}" if rest else verb
    return f"The only {noun} {named}s" if count == 1 else f"All {plural(count, noun)} {named}"


def parse_size(text: str) -> int | None:
    """Parse a size in bytes: `64MiB`, `80 GB`, `80g` (binary), `512`; None for other text."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    is_decimal = not match[3] and text.strip().upper().endswith("B")
    unit = (1000 if is_decimal else 1024) ** _POWERS[match[2].upper()]
    integer, _, rest = match[1].partition(".")
    # In integers: a float has too few digits for the bytes of a large device.
    num_bytes = int(integer[:20]) * unit + int(rest[:18] or 0) * unit // 10 ** len(rest[:18])
    return num_bytes if num_bytes <= _MAX_BYTES else None


def write_size(num_bytes: int) -> str | int:
    """Write a size for a contract: `64MiB` if exact, else the number; `parse_size` reads it."""
    for power, unit in zip((4, 3, 2, 1), _SIZE_UNITS, strict=True):
        if num_bytes and num_bytes % 1024**power == 0:
            return f"{num_bytes >> 10 * power}{unit}"
    return num_bytes


def round_size_up(num_bytes: int, slack: float) -> int:
    """Add the fraction `slack` to a size, and round up to a number that is short to write."""
    most = math.ceil(num_bytes * (1 + slack))
    # Three to four digits of the unit below: 70,464,308 bytes are at most 68,813 KiB.
    unit = 1 << 10 * max(0, (most.bit_length() - 1) // 10 - 1)
    return min(-(-most // unit) * unit, _MAX_BYTES)


def describe_size(num_bytes: int) -> str:
    """Format a size so that distinct sizes differ: `64 MiB`, `67,108,868 bytes (64.0 MiB)`."""
    if num_bytes < 1024:
        return f"{num_bytes} byte{'' if num_bytes == 1 else 's'}"
    written = write_size(num_bytes)
    if isinstance(written, str) and len(written) <= 7:
        return f"{written[:-3]} {written[-3:]}"
    return f"{num_bytes:,} bytes ({_round(num_bytes)})"


def _round(num_bytes: int) -> str:
    for power, unit in zip((4, 3, 2), _SIZE_UNITS, strict=False):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"
