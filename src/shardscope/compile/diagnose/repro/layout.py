"""Lines of source that are not too long to read."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

__all__ = ["lay_out_call", "with_remark", "wrap_numbers"]

_WIDTH = 100
_NUMBERS_WIDTH = 96  # they stand in the body of a function
_UNBROKEN: Any = {"break_long_words": False, "break_on_hyphens": False}


def lay_out_call(function: str, parts: Sequence[str], end: str, *, indent: str) -> list[str]:
    """A call or a definition on one line, or with one argument to a line."""
    line = f"{indent}{function}({', '.join(parts)}){end}"
    if len(line) <= _WIDTH or not parts:
        return [line]
    inner = f"{indent}    "
    return [f"{indent}{function}(", *(f"{inner}{part}," for part in parts), f"{indent}){end}"]


def wrap_numbers(line: str) -> list[str]:
    """A long line of numbers in brackets: a row to a line, and rows that are too long in several.

    Spaces in it stand inside of brackets, but for those before the first bracket.
    """
    if len(line) <= _NUMBERS_WIDTH:
        return [line]
    first, *others = line.replace("], [", "],\n[").split("\n")
    lines = textwrap.wrap(first, _NUMBERS_WIDTH, subsequent_indent="    ", **_UNBROKEN)
    for row in others:
        lines += textwrap.wrap(
            row, _NUMBERS_WIDTH, initial_indent="    ", subsequent_indent="     ", **_UNBROKEN
        )
    return lines


def with_remark(lines: list[str], remark: str) -> list[str]:
    """Lines of code with a comment behind the first, or before it where there is no room."""
    if not remark:
        return lines
    if len(lines[0]) + len(remark) + 4 <= _WIDTH:
        return [f"{lines[0]}  # {remark}", *lines[1:]]
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    return [f"{indent}# {remark}", *lines]
