"""Names from a stranger's program made safe to print, and short enough."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.text import Text

from shardscope.record import make_inert

__all__ = ["make_inert", "shorten", "shorten_names"]

_END = 2 / 3  # of what is kept of a name that is too long


def shorten(text: str, width: int) -> str:
    """At most `width` cells of a terminal, keeping both ends: the end of a name tells most."""
    if cell_len(text) <= width:
        return text
    head, tail = _find_cut(text, width)
    return text[:head] + "…" + text[len(text) - tail :]


def shorten_names(names: Sequence[Text], width: int) -> list[Text]:
    """The same for names that stand below each other, cut so that they stay different."""
    candidates = [[_cut(name, width, end) for name in names] for end in (_END, 1.0)]
    return max(candidates, key=lambda cut: len({name.plain for name in cut}))


def _cut(text: Text, width: int, end: float) -> Text:
    if text.cell_len <= width:
        return text
    head, tail = _find_cut(text.plain, width, end)
    return Text.assemble(text[:head], "…", text[len(text) - tail :])


def _find_cut(text: str, width: int, end: float = _END) -> tuple[int, int]:
    """How many characters to keep at the start and at the end, which gets that much of it."""
    room = max(0, width - 1)
    tail = _count_fitting(reversed(text), max(min(1, room), int(room * end)))
    used = cell_len(text[len(text) - tail :])
    return _count_fitting(text, room - used), tail


def _count_fitting(chars: Iterable[str], room: int) -> int:
    """How many of the first characters fit; some take two cells."""
    count = 0
    for char in chars:
        room -= cell_len(char)
        if room < 0:
            break
        count += 1
    return count
