"""Tells the numbers apart that a program reads on one line, as in `print(a.item(), b.item())`."""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType

_READS = ("float", "int", "item", "tolist")


def count_readings(code: CodeType, offset: int) -> int:
    """How many readings of numbers are on the line of an instruction, up to this one.

    It follows from the code alone, so that it is the same on ranks that run other parts of it.
    """
    lines, readings = _list_lines(code)
    line = lines[max((at for at in lines if at <= offset), default=0)]  # it may be in a cache
    return sum(lines[at] == line for at in readings if at <= offset)


@lru_cache(maxsize=512)
def _list_lines(code: CodeType) -> tuple[dict[int, int | None], list[int]]:
    """The line of each instruction, by offset, and the offsets of those that name a reading."""
    lines: dict[int, int | None] = {}
    readings = []
    for instruction in dis.get_instructions(code):
        lines[instruction.offset] = instruction.positions.lineno if instruction.positions else None
        if instruction.argval in _READS or instruction.opname.startswith("FORMAT_"):
            readings.append(instruction.offset)
    return lines, readings
