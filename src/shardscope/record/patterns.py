"""The pattern language for names of modules and tensors, such as `layers.*.attention.wq`.

It is the same wherever a user gives a pattern: `show --module`, `diff --module`, `visualize`,
contracts, and the plans of `audit`, `coverage` and `parallelize`. A pattern is matched with a
dotted name part by part:

- `*` matches one part, and inside a part any characters: `layers.*.w*` matches `layers.0.wq`, but
  not `layers.0.attention.wq`;
- `**` matches any number of parts, also none: `**.wq`, `layers.**`;
- `[8-15]` as an entire part matches these numbers;
- `?`, `[qkv]` and `[!qkv]` match one character, as in file names;
- the empty pattern matches the root module.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from glob import escape
from itertools import groupby
from typing import final

from shardscope.record.layer_names import fold_layers, is_layer_number

_ANY_PARTS = "**"
_RANGE = re.compile(r"\[([0-9]{1,9})-([0-9]{1,9})\]")


def is_pattern(text: str) -> bool:
    """Whether the text has wildcards, and so may match several names."""
    return any(char in text for char in "*?[")


def is_number_range(part: str) -> bool:
    """Whether a part of a pattern matches a range of layer numbers, as `[8-15]` does."""
    return _RANGE.fullmatch(part) is not None


def matches_name(pattern: str, name: str) -> bool:
    """Whether the pattern matches the dotted name of a module or a tensor.

    Examples:
        >>> matches_name("layers.*.wq", "layers.7.wq")
        True
        >>> matches_name("layers.*.wq", "layers.7.attn.wq")
        False
    """
    return _match_parts(split_name(pattern), split_name(name))


def matches_inside(pattern: str, name: str) -> bool:
    """Whether the pattern matches the name, or that of a module that contains it.

    Examples:
        >>> matches_inside("layers.*", "layers.7.attn.wq.weight")
        True
    """
    return _match_parts((*split_name(pattern), _ANY_PARTS), split_name(name))


@lru_cache(maxsize=65536)
def split_name(name: str) -> tuple[str, ...]:
    """The parts of a dotted name or pattern; the root, `""`, has none."""
    return tuple(name.split(".")) if name else ()


def _match_parts(pattern_parts: Sequence[str], parts: Sequence[str]) -> bool:
    # As shells match: on a mismatch, the last `**` matches one part more.
    pattern_index, index, star, resume_at = 0, 0, -1, 0
    while index < len(parts):
        if pattern_index < len(pattern_parts) and pattern_parts[pattern_index] == _ANY_PARTS:
            star, resume_at = pattern_index, index
            pattern_index += 1
        elif pattern_index < len(pattern_parts) and _match_part(
            pattern_parts[pattern_index], parts[index]
        ):
            pattern_index, index = pattern_index + 1, index + 1
        elif star >= 0:
            resume_at += 1
            pattern_index, index = star + 1, resume_at
        else:
            return False
    return all(part == _ANY_PARTS for part in pattern_parts[pattern_index:])


def _match_part(pattern_part: str, part: str) -> bool:
    """Whether a part of a pattern, other than `**`, matches a part of a name."""
    if pattern_part == part:
        return True
    if match := _RANGE.fullmatch(pattern_part):
        return is_layer_number(part) and int(match[1]) <= int(part) <= int(match[2])
    return fnmatchcase(part, pattern_part)


@final
class NameTree:
    """A prefix tree of names, which finds all names that a pattern matches.

    A pattern is compared with the parts of names, so that it need not be compared with every name
    of a large model. A name may stand for another, as an alias does for a shared module.
    """

    def __init__(self) -> None:
        self.name: str | None = None  # what the name that ends here stands for, if one ends here
        self._children: dict[str, NameTree] = {}

    def add(self, name: str, stands_for: str) -> None:
        """Add a name, and what `find` returns for it; a later call with this name overrides it."""
        node = self
        for part in split_name(name):
            node = node._children.setdefault(part, NameTree())
        node.name = stands_for

    def find(self, pattern: str) -> set[str]:
        """What the names that the pattern matches stand for."""
        parts = split_name(pattern)
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
            elif parts[position] == _ANY_PARTS:
                pending.append((node, position + 1))
                pending += [(child, position) for child in node._children.values()]
            else:
                pending += [(child, position + 1) for child in node._match(parts[position])]
        return names

    def _match(self, pattern_part: str) -> Iterable[NameTree]:
        """The children that a part of a pattern matches."""
        if not is_pattern(pattern_part):
            return [self._children[pattern_part]] if pattern_part in self._children else []
        return [child for part, child in self._children.items() if _match_part(pattern_part, part)]


Parts = tuple[str, ...]
GroupKey = Callable[[str], object]


def find_patterns(names: Iterable[str], group_key: GroupKey) -> list[str]:
    """The fewest patterns that match the names; the modules of a pattern have the same `group_key`.

    Args:
        names: Dotted names of modules.
        group_key: Called with a pattern. Returns what the modules that it matches have in common,
            or None if they differ.

    Examples:
        >>> find_patterns(["layers.0.wq", "layers.1.wq"], lambda pattern: "same")
        ['layers.*.wq']
    """
    by_shape: dict[str, list[Parts]] = defaultdict(list)
    for name in names:
        by_shape[fold_layers(name)].append(tuple(name.split(".")))
    return [
        ".".join(parts)
        for same_shape in by_shape.values()
        for parts in _fold(same_shape, 0, group_key)
    ]


def _fold(names: list[Parts], start: int, group_key: GroupKey) -> list[Parts]:
    """Patterns for names that differ only in layer numbers, and not in the parts before `start`."""
    first = names[0]
    starred = _escape(first[:start]) + tuple(
        "*" if is_layer_number(part) else escape(part) for part in first[start:]
    )
    if len(names) == 1:
        return [_escape(first)]
    if group_key(".".join(starred)) is not None:
        return [starred]
    position = next(
        index for index in range(start, len(first)) if len({name[index] for name in names}) > 1
    )
    return list(_fold_numbered(names, position, group_key))


def _fold_numbered(names: list[Parts], index: int, group_key: GroupKey) -> Iterator[Parts]:
    """Patterns by layer number; consecutive numbers with the same key become a range."""
    buckets: dict[str, list[Parts]] = defaultdict(list)
    for name in names:
        buckets[name[index]].append(name)
    numbers = sorted(buckets, key=int)
    folded = {number: _fold(buckets[number], index + 1, group_key) for number in numbers}

    def kind(item: tuple[int, str]) -> object:
        position, number = item
        tails = [parts[index + 1 :] for parts in folded[number]]
        # Consecutive numbers have the same distance to their positions.
        return (
            int(number) - position,
            tails,
            [group_key(".".join(pattern)) for pattern in folded[number]],
        )

    for _, run in groupby(enumerate(numbers), key=kind):
        yield from _join([number for _, number in run], folded, index, group_key)


def _join(
    numbers: list[str], folded: dict[str, list[Parts]], index: int, group_key: GroupKey
) -> Iterator[Parts]:
    number_range = f"[{numbers[0]}-{numbers[-1]}]"
    joined = [
        (*pattern[:index], number_range, *pattern[index + 1 :]) for pattern in folded[numbers[0]]
    ]
    if len(numbers) > 1 and all(group_key(".".join(pattern)) is not None for pattern in joined):
        yield from joined
    else:
        yield from (pattern for number in numbers for pattern in folded[number])


def _escape(parts: Parts) -> Parts:
    return tuple(map(escape, parts))
