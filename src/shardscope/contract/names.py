"""The modules of a recording by name, and which of them a pattern matches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import lru_cache
from typing import final

from shardscope.record import Recording
from shardscope.record.patterns import ANY_PARTS, is_pattern, matches_part

_MAX_COMPARED = 2_000  # names; comparing takes its time
_MAX_DIGITS = 9


@final
class ModuleIndex:
    """Modules by name: recorded modules, modules that issued collectives, and their parents."""

    def __init__(self, recording: Recording, owners: Iterable[str]) -> None:
        issuing = dict.fromkeys(ancestor for owner in owners for ancestor in ancestors(owner))
        names = dict.fromkeys(module.name for module in recording.modules) | issuing
        self.order = {name: index for index, name in enumerate(names)}
        self._root = _Node()
        for module in recording.modules:
            # An alias is the shared module, unless a module was recorded under that name.
            for name in module.aliases:
                self._root.at(name).name = module.name
        for name in names:
            self._root.at(name).name = name
        self._matches: dict[str, tuple[str, ...]] = {}

    def match(self, pattern: str) -> tuple[str, ...]:
        """The names that the pattern matches, in the model's order."""
        if pattern not in self._matches:
            names = self._root.find(tuple(pattern.split(".")) if pattern else ())
            self._matches[pattern] = tuple(sorted(names, key=self.order.__getitem__))
        return self._matches[pattern]

    def suggest(self, pattern: str) -> tuple[str, ...]:
        """Similar patterns that match modules, or else a few existing ones."""
        folded = list(dict.fromkeys(map(fold_numbers, self.order)))[:_MAX_COMPARED]
        near = get_close_matches(fold_numbers(pattern), [name for name in folded if name], n=3)
        return tuple(near or [name for name in folded if name][:3])


@final
class _Node:
    """A node of a prefix tree of names, so that not every name is compared with a pattern."""

    def __init__(self) -> None:
        self.name: str | None = None  # of the module that ends here, if one does
        self.children: dict[str, _Node] = {}

    def at(self, name: str) -> _Node:
        node = self
        for part in name.split(".") if name else ():
            node = node.children.setdefault(part, _Node())
        return node

    def find(self, parts: tuple[str, ...]) -> set[str]:
        """Names below this node that the parts of a pattern match."""
        names: set[str] = set()
        seen: set[tuple[int, int]] = set()
        pending = [(self, 0)]
        while pending:
            node, position = pending.pop()
            if (id(node), position) in seen:
                continue
            seen.add((id(node), position))
            if position == len(parts):
                names |= set() if node.name is None else {node.name}
            elif parts[position] == ANY_PARTS:
                pending += [
                    (node, position + 1),
                    *((child, position) for child in node.children.values()),
                ]
            else:
                pending += [
                    (child, position + 1) for child in node.matching_children(parts[position])
                ]
        return names

    def matching_children(self, pattern_part: str) -> Iterable[_Node]:
        """The children that a part of a pattern matches."""
        if not is_pattern(pattern_part):
            return [self.children[pattern_part]] if pattern_part in self.children else []
        return [child for part, child in self.children.items() if matches_part(pattern_part, part)]


@lru_cache(maxsize=65536)
def ancestors(name: str) -> tuple[str, ...]:
    """The names of the root, of every module that contains this one, and its own."""
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
