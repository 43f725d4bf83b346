"""What a user may have meant by a name that the program does not have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches

from shardscope.record.patterns import is_pattern, matches_deeply

__all__ = ["suggest_name"]

_MAX_COMPARED = 4000


def suggest_name(pattern: str, names: Sequence[str]) -> str:
    """A few words on what the program has instead, and the remedy."""
    for suggestion in (_layers, _prefix, _close):
        if found := suggestion(pattern, names):
            return found
    tops = sorted({name.partition(".")[0] for name in names if name})
    shown = ", ".join(tops[:6]) + (" and others" if len(tops) > 6 else "")
    return f" (it has {shown}). Fix the name or remove the entry." if tops else ""


def _layers(pattern: str, names: Sequence[str]) -> str:
    """Where it is right but for the number of a layer."""
    parts = pattern.split(".")
    for position, part in enumerate(parts):
        wild = ".".join(["*" if at == position else one for at, one in enumerate(parts)])
        if not re.fullmatch(r"\d+|\[\d+-\d+\]", part):
            continue
        there = [name.split(".")[position] for name in names if matches_deeply(wild, name)]
        numbers = sorted({int(one) for one in there if one.isdecimal()})
        if numbers:
            before = "".join(f"{one}." for one in parts[:position])
            span = f"{before}{numbers[0]} … {before}{numbers[-1]}"
            return f" (it has {span}). Check the layer count, or use the pattern {wild!r}."
    return ""


def _prefix(pattern: str, names: Sequence[str]) -> str:
    """Where it is right but for what stands before it, or for what does not."""
    found = next((name for name in names if matches_deeply(f"**.{pattern}", name)), None)
    if found is not None:
        missing = found.split(".")[: len(found.split(".")) - len(pattern.split("."))]
        before = ".".join("*" if part.isdecimal() else part for part in missing)
        if missing and "**" not in pattern:
            return f" (it has {found!r}). Write '{before}.{pattern}'."
    head, _, rest = pattern.partition(".")
    if rest and any(matches_deeply(rest, name) for name in names):
        return f" (it has {rest!r}, without {head!r}). Write {rest!r}."
    return ""


def _close(pattern: str, names: Sequence[str]) -> str:
    plain = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names))
    wanted = re.sub(r"(?<![^.])(\d+|\[[^]]*\])(?![^.])", "*", pattern)
    near = get_close_matches(wanted, plain[:_MAX_COMPARED], n=1)
    if not near:
        return ""
    exact = get_close_matches(pattern, list(names)[:_MAX_COMPARED], n=1)
    meant = exact[0] if exact and not is_pattern(pattern) else near[0]
    return f". Did you mean {meant!r}?"
