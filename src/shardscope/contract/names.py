"""The modules that a recording knows, and which of them a pattern fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import lru_cache
from typing import final

from shardscope.record import Recording
from shardscope.record.patterns import ANY_PARTS, is_pattern, matches_part

__all__ = ["Names", "ancestors", "fold_numbers", "is_number"]

_MAX_COMPARED = 2_000  # names; comparing takes its time
_MAX_DIGITS = 9


@final
class Names:
    """Modules by name: those that were described, those that said something, and their parents."""

    def __init__(self, recording: Recording, owners: Iterable[str]) -> None:
        speaking = dict.fromkeys(one for owner in owners for one in ancestors(owner))
        found = dict.fromkeys(module.name for module in recording.modules) | speaking
        self.order = {name: index for index, name in enumerate(found)}
        self._root = _Node()
        for module in recording.modules:
            # A further name of a shared module is that module, unless it was told apart.
            for name in module.aliases:
                self._root.at(name).name = module.name
        for name in found:
            self._root.at(name).name = name
        self._fits: dict[str, tuple[str, ...]] = {}

    def fit(self, pattern: str) -> tuple[str, ...]:
        """All that the pattern fits, in the model's order."""
        if pattern not in self._fits:
            found = self._root.find(tuple(pattern.split(".")) if pattern else ())
            self._fits[pattern] = tuple(sorted(found, key=self.order.__getitem__))
        return self._fits[pattern]

    def suggest(self, pattern: str) -> tuple[str, ...]:
        """Patterns much like it that fit something; some of those there are, if none is."""
        folded = list(dict.fromkeys(map(fold_numbers, self.order)))[:_MAX_COMPARED]
        near = get_close_matches(fold_numbers(pattern), [one for one in folded if one], n=3)
        return tuple(near or [one for one in folded if one][:3])


@final
class _Node:
    """A part of names, and the parts that follow it: thousands of names need not be compared."""

    def __init__(self) -> None:
        self.name: str | None = None  # of the module that ends here, if one does
        self.children: dict[str, _Node] = {}

    def at(self, name: str) -> _Node:
        node = self
        for part in name.split(".") if name else ():
            node = node.children.setdefault(part, _Node())
        return node

    def find(self, wanted: tuple[str, ...]) -> set[str]:
        """Names from here on that the parts of a pattern fit."""
        found: set[str] = set()
        seen: set[tuple[int, int]] = set()
        pending = [(self, 0)]
        while pending:
            node, at = pending.pop()
            if (id(node), at) in seen:
                continue
            seen.add((id(node), at))
            if at == len(wanted):
                found |= set() if node.name is None else {node.name}
            elif wanted[at] == ANY_PARTS:
                pending += [(node, at + 1), *((child, at) for child in node.children.values())]
            else:
                pending += [(child, at + 1) for child in node.fitting(wanted[at])]
        return found

    def fitting(self, wanted: str) -> Iterable[_Node]:
        """The children that one part of a pattern fits."""
        if not is_pattern(wanted):
            return [self.children[wanted]] if wanted in self.children else []
        return [child for part, child in self.children.items() if matches_part(wanted, part)]


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
