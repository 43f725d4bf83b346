"""Parses and formats sizes in bytes, such as `64MiB`, without losing digits."""

from __future__ import annotations

import math
import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_UNITS = ("TiB", "GiB", "MiB", "KiB")
_MOST = 2**63 - 1


def parse_size(text: str) -> int | None:
    """The bytes of `64MiB`, `80 GB`, `80g` (binary) or `512`; None for other text."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    is_decimal = not match[3] and text.strip().upper().endswith("B")
    unit = (1000 if is_decimal else 1024) ** _POWERS[match[2].upper()]
    integer, _, rest = match[1].partition(".")
    # In integers: a float has too few digits for the bytes of a large device.
    num_bytes = int(integer[:20]) * unit + int(rest[:18] or 0) * unit // 10 ** len(rest[:18])
    return num_bytes if num_bytes <= _MOST else None


def write_size(num_bytes: int) -> str | int:
    """`64MiB` if that is exact, else the number of bytes; `parse_size` inverts it."""
    for power, unit in zip((4, 3, 2, 1), _UNITS, strict=True):
        if num_bytes and num_bytes % 1024**power == 0:
            return f"{num_bytes >> 10 * power}{unit}"
    return num_bytes


def round_up(num_bytes: int, slack: float) -> int:
    """Add the fraction `slack`, and round up to a number that is short to write."""
    most = math.ceil(num_bytes * (1 + slack))
    # Three to four digits of the unit below: 70,464,308 bytes are at most 68,813 KiB.
    unit = 1 << 10 * max(0, (most.bit_length() - 1) // 10 - 1)
    return min(-(-most // unit) * unit, _MOST)


def describe_size(num_bytes: int) -> str:
    """`64 MiB`, `512 bytes`, `67,108,868 bytes (64.0 MiB)`: distinct for distinct sizes."""
    if num_bytes < 1024:
        return f"{num_bytes} byte{'' if num_bytes == 1 else 's'}"
    written = write_size(num_bytes)
    if isinstance(written, str) and len(written) <= 7:
        return f"{written[:-3]} {written[-3:]}"
    return f"{num_bytes:,} bytes ({_round(num_bytes)})"


def _round(num_bytes: int) -> str:
    for power, unit in zip((4, 3, 2), _UNITS, strict=False):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"
