"""Writes units.cases.json: numbers and how Python formats them, for the TypeScript tests."""

from __future__ import annotations

import json

from shardscope.record.units import format_bytes, format_count, format_duration, format_flops

_FORMATTERS = {
    "bytes": format_bytes,
    "count": format_count,
    "duration": format_duration,
    "flops": format_flops,
}


def write_cases() -> str:
    """Numbers around powers of the base, where digits and units change, and halves."""
    numbers = sorted({number for base in (1000, 1024) for number in _around_powers(base)})
    cases = {
        name: {str(n): format_number(n) for n in numbers}
        for name, format_number in _FORMATTERS.items()
    }
    return json.dumps(cases, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _around_powers(base: int) -> list[int]:
    small = (1, 1.25, 1.125, 2.5, 3.375, 9.994, 9.995)
    shares = (*small, 10.25, 10.75, 99.94, 99.95, 100.5, 101.5, 999.4, 999.5)
    return [0, 1, 7, *(int(share * base**power) for power in range(1, 5) for share in shares)]


if __name__ == "__main__":
    print(write_cases(), end="")
