"""Folds names of layers that differ only in their numbers, also inside texts."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Numbers that are components of dotted names: not those of `dim 0` or `linear_3`.
_NUMBER = re.compile(r"(?<![\w.])\d+(?=\.\w)|(?<=\w\.)\d+(?!\w)")
_MAX_DIGITS = 9  # digits of a layer's number
# The same in a text that is exactly one dotted name.
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


def collapse_layer_indices(path: str) -> str:
    """Replace the layer numbers in a path with `*`: `layers.*.wq`."""
    return _INDEX.sub("*", path)


def collapse_layer_numbers(text: str) -> str:
    """Replace the layer numbers of all paths in a text with `*`."""
    return _NUMBER.sub("*", text)


def name_layer_range(texts: Sequence[str]) -> str:
    """Join texts that differ only in layer numbers: `layers.0-79.attn.wo`."""
    numbers_of_texts = [_NUMBER.findall(text) for text in texts]
    if len({len(numbers) for numbers in numbers_of_texts}) > 1:  # the original text contains a `*`
        return texts[0]
    numbers = iter([_name_numbers(set(column)) for column in zip(*numbers_of_texts, strict=True)])
    return _NUMBER.sub(lambda _: next(numbers), texts[0])


def _name_numbers(texts: set[str]) -> str:
    if len(texts) == 1:
        return texts.pop()
    if any(len(text) > _MAX_DIGITS for text in texts):
        return "*"
    numbers = sorted(map(int, texts))
    is_run = numbers[-1] - numbers[0] == len(numbers) - 1
    return f"{numbers[0]}-{numbers[-1]}" if is_run else "*"
