"""The modules that a recording knows, and which of them a pattern fits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import lru_cache
from typing import final

from shardscope.record import Recording
from shardscope.record.patterns import matches_deeply

__all__ = ["Names", "ancestors", "fold_numbers", "is_number"]

_MAX_COMPARED = 2_000  # names; comparing takes its time
_MAX_DIGITS = 9


@final
class Names:
    """Modules by name: those that were described, those that said something, and their parents."""

    def __init__(self, recording: Recording, owners: Iterable[str]) -> None:
        described = (
            name for module in recording.modules for name in (module.name, *module.aliases)
        )
        found = dict.fromkeys(described)
        found |= dict.fromkeys(one for owner in owners for one in ancestors(owner))
        self.order = {name: index for index, name in enumerate(found)}
        self._by_length: dict[int, list[str]] = defaultdict(list)
        for name in found:
            self._by_length[_num_parts(name)].append(name)
        self._fits: dict[str, tuple[str, ...]] = {}

    def fit(self, pattern: str) -> tuple[str, ...]:
        """All that the pattern fits, in the model's order."""
        if pattern not in self._fits:
            names = self._candidates(pattern)
            self._fits[pattern] = tuple(name for name in names if matches_deeply(pattern, name))
        return self._fits[pattern]

    def suggest(self, pattern: str) -> tuple[str, ...]:
        """Patterns much like it that fit something; some of those there are, if none is."""
        folded = list(dict.fromkeys(map(fold_numbers, self.order)))[:_MAX_COMPARED]
        near = get_close_matches(fold_numbers(pattern), [one for one in folded if one], n=3)
        return tuple(near or [one for one in folded if one][:3])

    def _candidates(self, pattern: str) -> Iterable[str]:
        if "**" in pattern:
            return self.order
        return self._by_length.get(_num_parts(pattern), ())


def _num_parts(name: str) -> int:
    return name.count(".") + 1 if name else 0


@lru_cache(maxsize=65536)
def ancestors(name: str) -> tuple[str, ...]:
    """The root, and every module on the way to this one, itself included."""
    return tuple(_prefixes(name))


def _prefixes(name: str) -> Iterator[str]:
    yield ""
    at = name.find(".")
    while at >= 0:
        yield name[:at]
        at = name.find(".", at + 1)
    if name:
        yield name


def fold_numbers(name: str) -> str:
    """`layers.*.attn` for `layers.7.attn`."""
    return ".".join("*" if is_number(part) else part for part in name.split("."))


def is_number(part: str) -> bool:
    """Whether a part of a name numbers a layer."""
    return part.isascii() and part.isdecimal() and len(part) <= _MAX_DIGITS
