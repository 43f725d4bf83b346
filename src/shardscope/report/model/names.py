"""Sanitizes and shortens names from the user's program."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.text import Text

_END = 2 / 3  # the part of a shortened name that is taken from its end
_LINE = re.compile(r"(?<=\S):\d+(?![\w.:])")  # of a source file, as in `train.py:12 forward`


def shorten(text: str, width: int) -> str:
    """Shorten to `width` cells in the middle; the line number in `train.py:12` is never lost."""
    if cell_len(text) <= width:
        return text
    return "…".join(text[start:stop] for start, stop in _find_parts(text, width, _END))


def shorten_names(names: Sequence[Text], width: int) -> list[Text]:
    """Shorten names in a column so that they remain distinct where that is possible."""
    candidates = [[_shorten_text(name, width, end) for name in names] for end in (_END, 1.0)]
    return max(candidates, key=lambda texts: len({text.plain for text in texts}))


def _shorten_text(text: Text, width: int, end: float) -> Text:
    if text.cell_len <= width:
        return text
    parts = _find_parts(text.plain, width, end)
    return Text("…").join(text[start:stop] for start, stop in parts)


def _find_parts(text: str, width: int, end: float) -> list[tuple[int, int]]:
    """Return the ranges of the text to keep; an ellipsis goes between them."""
    size = len(text)
    line = _LINE.search(text)
    # Text after a line number is dropped first: the path before it matters more.
    stop = line.end() if line is not None and line.end() < size else size
    drops_tail = stop < size and cell_len(text[:stop]) + 1 > width
    if stop < size and not drops_tail:
        return [(0, _count_fitting(text, width - 1)), (size, size)]
    room = width - 1 if drops_tail else width
    tail = 0 if line is None else stop - line.start()
    head, tail = _count_ends(text[:stop], room, end, min_tail=tail)
    parts = [(0, head), (stop - tail, stop)]
    return [*parts, (size, size)] if drops_tail else parts


def _count_ends(text: str, width: int, end: float, *, min_tail: int = 0) -> tuple[int, int]:
    """Return how many characters to keep at the start and, with the fraction `end`, at the end."""
    room = max(0, width - 1)
    tail = _count_fitting(reversed(text), max(min(1, room), int(room * end), min(min_tail, room)))
    used = cell_len(text[len(text) - tail :])
    return _count_fitting(text, room - used), tail


def _count_fitting(chars: Iterable[str], room: int) -> int:
    """Count the characters that fit into `room` cells; some take two cells."""
    count = 0
    for char in chars:
        room -= cell_len(char)
        if room < 0:
            break
        count += 1
    return count
