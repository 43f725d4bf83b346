"""Modules that are alike as one pattern: `layers.*.attn`, or `layers.[0-30]` where one differs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from glob import escape
from itertools import groupby

from shardscope.contract.names import fold_numbers, is_number

__all__ = ["fold_names"]

Parts = tuple[str, ...]
Likeness = Callable[[str], object]
"""What all modules that a pattern fits have in common, or None if they differ."""


def fold_names(names: Iterable[str], likeness: Likeness) -> list[str]:
    """Patterns that fit all the names, and whose modules are alike."""
    by_shape: dict[str, list[Parts]] = defaultdict(list)
    for name in names:
        by_shape[fold_numbers(name)].append(tuple(name.split(".")))
    return [".".join(parts) for alike in by_shape.values() for parts in _fold(alike, 0, likeness)]


def _fold(names: list[Parts], start: int, likeness: Likeness) -> list[Parts]:
    """Patterns for names that have the same shape, and the same parts before `start`."""
    first = names[0]
    starred = _escape(first[:start]) + tuple(
        "*" if is_number(part) else escape(part) for part in first[start:]
    )
    if len(names) == 1:
        return [_escape(first)]
    if likeness(".".join(starred)) is not None:
        return [starred]
    place = next(at for at in range(start, len(first)) if len({one[at] for one in names}) > 1)
    return list(_fold_numbered(names, place, likeness))


def _fold_numbered(names: list[Parts], place: int, likeness: Likeness) -> Iterator[Parts]:
    """Each number by itself, and then those that follow each other and are alike together."""
    buckets: dict[str, list[Parts]] = defaultdict(list)
    for name in names:
        buckets[name[place]].append(name)
    numbers = sorted(buckets, key=int)
    folded = {number: _fold(buckets[number], place + 1, likeness) for number in numbers}

    def kind(item: tuple[int, str]) -> object:
        position, number = item
        tails = [parts[place + 1 :] for parts in folded[number]]
        # Numbers that follow each other are as far from their positions.
        return int(number) - position, tails, [likeness(".".join(one)) for one in folded[number]]

    for _, run in groupby(enumerate(numbers), key=kind):
        yield from _join([number for _, number in run], folded, place, likeness)


def _join(
    numbers: list[str], folded: dict[str, list[Parts]], place: int, likeness: Likeness
) -> Iterator[Parts]:
    spread = f"[{numbers[0]}-{numbers[-1]}]"
    joined = [(*one[:place], spread, *one[place + 1 :]) for one in folded[numbers[0]]]
    if len(numbers) > 1 and all(likeness(".".join(one)) is not None for one in joined):
        yield from joined
    else:
        yield from (one for number in numbers for one in folded[number])


def _escape(parts: Parts) -> Parts:
    return tuple(map(escape, parts))
