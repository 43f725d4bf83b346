"""On which line of a TOML file each key is: its parser does not say."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from typing import TypeAlias

__all__ = ["Path", "find_lines"]

Path: TypeAlias = tuple[str | int, ...]
"""Keys that lead to a value; tables of an array are numbered."""

_BARE = re.compile(r"[\w-]+(?:\s*\.\s*[\w-]+)*")
_HEADER = re.compile(r"\s*(\[\[?)\s*(.+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")


def find_lines(text: str) -> dict[Path, int]:
    """Lines of tables and keys, from 1; what lies within a value has that of its key."""
    lines: dict[Path, int] = {}
    seen: Counter[Path] = Counter()
    table: Path = ()
    for number, line in enumerate(text.split("\n"), start=1):
        if header := _HEADER.match(line):
            table = _split(header[2])
            if header[1] == "[[":
                seen[table] += 1
                table = (*table, seen[table] - 1)
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            lines.setdefault((*table, *_split(key[1])), number)
    return lines


def _split(key: str) -> Path:
    """`contract."a.b"` as its two keys."""
    if _BARE.fullmatch(key):
        return tuple(part.strip() for part in key.split("."))
    try:
        value: object = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        return (key,)
    parts: list[str | int] = []
    while isinstance(value, dict) and value:
        ((name, value),) = value.items()
        parts.append(name)
    return tuple(parts)
