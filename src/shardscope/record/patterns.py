"""Patterns of names, as plans write them: `layers.*.attn.wq`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

__all__ = ["ANY_PARTS", "is_pattern", "matches_deeply", "matches_part", "matches_parts"]

ANY_PARTS = "**"
_RANGE = re.compile(r"\[(\d+)-(\d+)\]")


def is_pattern(text: str) -> bool:
    """Whether the text may match several names."""
    return any(char in text for char in "*?[")


def matches_parts(pattern: str, name: str) -> bool:
    """Whether the pattern matches the name part by part, as torch matches plans."""
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted))


def matches_deeply(pattern: str, name: str) -> bool:
    """The same, where `**` stands for any number of parts, and `[8-15]` for those numbers."""
    parts = name.split(".") if name else []
    return _match(_split(pattern), parts)


@lru_cache(maxsize=4096)
def _split(pattern: str) -> tuple[str, ...]:
    return tuple(pattern.split(".")) if pattern else ()


def _match(wanted: Sequence[str], parts: Sequence[str]) -> bool:
    # As shells match: on a mismatch, the last `**` takes one part more.
    at, place, star, taken = 0, 0, -1, 0
    while place < len(parts):
        if at < len(wanted) and wanted[at] == ANY_PARTS:
            star, taken = at, place
            at += 1
        elif at < len(wanted) and matches_part(wanted[at], parts[place]):
            at, place = at + 1, place + 1
        elif star >= 0:
            taken += 1
            at, place = star + 1, taken
        else:
            return False
    return all(one == ANY_PARTS for one in wanted[at:])


def matches_part(wanted: str, part: str) -> bool:
    """Whether one part of a pattern, other than `**`, matches one part of a name."""
    if wanted == part:
        return True
    if found := _RANGE.fullmatch(wanted):
        return part.isdecimal() and int(found[1]) <= int(part) <= int(found[2])
    return fnmatchcase(part, wanted)
