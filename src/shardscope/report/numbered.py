"""Names of layers that differ in nothing but numbers, and texts with such names in them."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["fold_numbers", "fold_path", "name_all"]

# Numbers that are parts of dotted names: not those of `dim 0` or `linear_3`.
_NUMBER = re.compile(r"(?<![\w.])\d+(?=\.\w)|(?<=\w\.)\d+(?!\w)")
_MAX_DIGITS = 9  # of the number of a layer
# The same in a text that is a dotted name and nothing else.
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


def fold_path(path: str) -> str:
    """`layers.*.wq`, as findings name what is the same in every layer."""
    return _INDEX.sub("*", path)


def fold_numbers(text: str) -> str:
    """The same for texts that differ in numbers of layers alone."""
    return _NUMBER.sub("*", text)


def name_all(texts: Sequence[str]) -> str:
    """`layers.0-79.attn.wo`, for texts that fold to the same."""
    found = [_NUMBER.findall(text) for text in texts]
    if len({len(numbers) for numbers in found}) > 1:  # a `*` that was there before
        return texts[0]
    numbers = iter([_name_numbers(set(column)) for column in zip(*found, strict=True)])
    return _NUMBER.sub(lambda _: next(numbers), texts[0])


def _name_numbers(texts: set[str]) -> str:
    if len(texts) == 1:
        return texts.pop()
    if any(len(text) > _MAX_DIGITS for text in texts):
        return "*"
    numbers = sorted(map(int, texts))
    is_run = numbers[-1] - numbers[0] == len(numbers) - 1
    return f"{numbers[0]}-{numbers[-1]}" if is_run else "*"
