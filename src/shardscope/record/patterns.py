"""Matches names with patterns such as `layers.*.attn.wq`, as plans and contracts use them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

ANY_PARTS = "**"
_RANGE = re.compile(r"\[(\d+)-(\d+)\]")


def is_pattern(text: str) -> bool:
    """Whether the text may match several names."""
    return any(char in text for char in "*?[")


def matches_parts(pattern: str, name: str) -> bool:
    """Whether the pattern matches the name part by part, as torch matches plans."""
    pattern_parts, parts = pattern.split("."), name.split(".")
    return len(pattern_parts) == len(parts) and all(map(fnmatchcase, parts, pattern_parts))


def matches_deeply(pattern: str, name: str) -> bool:
    """As `matches_parts`, and `**` matches any number of parts, `[8-15]` those numbers."""
    parts = name.split(".") if name else []
    return _match(_split(pattern), parts)


@lru_cache(maxsize=4096)
def _split(pattern: str) -> tuple[str, ...]:
    return tuple(pattern.split(".")) if pattern else ()


def _match(pattern_parts: Sequence[str], parts: Sequence[str]) -> bool:
    # As shells match: on a mismatch, the last `**` matches one part more.
    pattern_index, index, star, resume_at = 0, 0, -1, 0
    while index < len(parts):
        if pattern_index < len(pattern_parts) and pattern_parts[pattern_index] == ANY_PARTS:
            star, resume_at = pattern_index, index
            pattern_index += 1
        elif pattern_index < len(pattern_parts) and matches_part(
            pattern_parts[pattern_index], parts[index]
        ):
            pattern_index, index = pattern_index + 1, index + 1
        elif star >= 0:
            resume_at += 1
            pattern_index, index = star + 1, resume_at
        else:
            return False
    return all(part == ANY_PARTS for part in pattern_parts[pattern_index:])


def matches_part(pattern_part: str, part: str) -> bool:
    """Whether a part of a pattern, other than `**`, matches a part of a name."""
    if pattern_part == part:
        return True
    if match := _RANGE.fullmatch(pattern_part):
        return part.isdecimal() and int(match[1]) <= int(part) <= int(match[2])
    return fnmatchcase(part, pattern_part)
