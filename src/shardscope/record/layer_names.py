"""Folds the names of repeated layers, which differ only in their numbers, into one.

A layer's number is a part of a dotted name: the 7 of `layers.7.attn`, not that of `linear_7`.
Numbers of more than nine digits are not those of layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_DIGITS = "[0-9]{1,9}"
# A part of a text that is one dotted name.
_NUMBER = re.compile(rf"(?<![^.]){_DIGITS}(?![^.])")
# The same, or an index in brackets: `states[3]`.
_INDEX = re.compile(rf"(?<![^.\[]){_DIGITS}(?![^.\]])")
# The same, or what stands for several numbers: `0-79` or `*`.
_NUMBERS = re.compile(rf"(?<![^.])({_DIGITS}(-{_DIGITS})?|\*)(?![^.])")
_SEVERAL = re.compile(rf"(?<![^.])({_DIGITS}-{_DIGITS}|\*)(?![^.])")
# A part of a dotted name inside a text: not the number of `dim 0`.
_NUMBER_IN_TEXT = re.compile(rf"(?<![\w.]){_DIGITS}(?=\.\w)|(?<=\w\.){_DIGITS}(?!\w)")


def is_layer_number(part: str) -> bool:
    """Whether a part of a dotted name is a layer's number."""
    return _NUMBER.fullmatch(part) is not None


def fold_layers(name: str) -> str:
    """Replace the layer numbers of one dotted name by `*`: `layers.7.wq` becomes `layers.*.wq`."""
    return _NUMBER.sub("*", name)


def fold_indices(name: str) -> str:
    """As `fold_layers`, and also indices in brackets: `0.states[3]` becomes `*.states[*]`."""
    return _INDEX.sub("*", name)


def fold_layer_ranges(name: str) -> str:
    """As `fold_layers`, and also ranges: `layers.0-79.wq` becomes `layers.*.wq`."""
    return _NUMBERS.sub("*", name)


def has_layer_range(name: str) -> bool:
    """Whether a name stands for several layers: `layers.0-79.wq`, `layers.*.wq`."""
    return _SEVERAL.search(name) is not None


def fold_layers_in_text(text: str) -> str:
    """Replace the layer numbers of all dotted names in a text by `*`."""
    return _NUMBER_IN_TEXT.sub("*", text)


def _format_range(numbers: Sequence[int]) -> str:
    """`0-79` for consecutive numbers, `*` for others."""
    is_run = numbers[-1] - numbers[0] == len(numbers) - 1
    return f"{numbers[0]}-{numbers[-1]}" if is_run else "*"


FormatNumbers = Callable[[Sequence[int]], str]
"""Formats the distinct numbers that layers have at one position of their names, in order."""


def join_layers(names: Sequence[str], format_numbers: FormatNumbers = _format_range) -> str:
    """Join dotted names that differ only in layer numbers into one name.

    Examples:
        >>> join_layers(["layers.0.wq", "layers.1.wq", "layers.2.wq"])
        'layers.0-2.wq'
    """
    return _join(names, _NUMBER, format_numbers)


def join_layers_in_texts(
    texts: Sequence[str], format_numbers: FormatNumbers = _format_range
) -> str:
    """Join texts that differ only in the layer numbers of dotted names, as `join_layers` does."""
    return _join(texts, _NUMBER_IN_TEXT, format_numbers)


def _join(texts: Sequence[str], number: re.Pattern[str], format_numbers: FormatNumbers) -> str:
    numbers_of_texts = [number.findall(text) for text in texts]
    if len({len(numbers) for numbers in numbers_of_texts}) > 1:  # a text has a `*` of its own
        return texts[0]
    columns = [set(column) for column in zip(*numbers_of_texts, strict=True)]
    joined = iter(
        [
            column.pop() if len(column) == 1 else format_numbers(sorted(map(int, column)))
            for column in columns
        ]
    )
    return number.sub(lambda _: next(joined), texts[0])
