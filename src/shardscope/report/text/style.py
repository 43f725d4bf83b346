"""Text, titles, bars and source lines that all sections share; names are shortened to fit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.containers import Lines
from rich.text import Text

from shardscope.record import Source
from shardscope.record.text import sanitize_text

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


_BAR_CELLS = 8
_LEVELS = " ▁▂▃▄▅▆▇█"
_LITTLE = "·"
_LOCATION = re.compile(r"(\S+:\d+)(?![\w.:])(\S{0,3})")  # a path, a line number, punctuation


@final
class _Prose(Text):
    """Text in which a path that is wider than a line is shortened, so that `:12` is not split."""

    def wrap(self, console: Console, width: int, *args: Any, **kwargs: Any) -> Lines:
        """Break into lines of at most `width` cells."""
        text: Text = self
        for match in reversed(list(_LOCATION.finditer(self.plain))):
            if len(match[0]) > width:
                start, stop = match.span(1)
                location = shorten(match[1], width - len(match[2]))
                text = Text.assemble(text[:start], location, text[stop:])
                text.justify, text.overflow, text.no_wrap = (
                    self.justify,
                    self.overflow,
                    self.no_wrap,
                )
        return Text.wrap(text, console, width, *args, **kwargs)


def make_text(text: str, style: str = "", *, width: int = 400) -> Text:
    """Return sanitized text of the user's program: no markup, no escapes, at most `width` cells."""
    return _Prose(shorten(sanitize_text(text), width), style)


def make_title(title: str, note: str = "") -> Text:
    """Return a section's title with a blank line above; both texts are sanitized."""
    line = _Prose("\n").append(sanitize_text(title), "bold")
    return line.append(f"  {sanitize_text(note)}", "dim") if note else line


def format_share(part: int, total: int) -> str:
    """Format a percentage: `12%`, `<1%`; empty if the total is zero."""
    if not total:
        return ""
    share = part / total
    return "<1%" if 0 < share < 0.01 else f"{share:.0%}"


def format_bar(part: int, total: int) -> Text:
    """Draw a fraction as a bar; a damaged file's part may exceed the total, which is capped."""
    cells = round(min(1.0, part / total) * _BAR_CELLS) if total else 0
    return Text("█" * cells, "cyan")


def draw_level(value: int, most: int) -> str:
    """Draw a value as an upright bar in one cell, in eighths of `most`.

    A value too small for the lowest bar is a dot; zero is a blank.
    """
    if value <= 0 or most <= 0:
        return _LEVELS[0]
    height = round(min(1.0, value / most) * (len(_LEVELS) - 1))
    return _LEVELS[height] if height else _LITTLE


_MIN_FILE = 12  # characters of a path that identify the file
_MIN_CODE = 16  # characters of code worth showing
_MAX_WIDTH = 120


@final
class SourceLine:
    """A source line, shortened to one line of the terminal."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield format_source(self._source, width=min(_MAX_WIDTH, options.max_width))


def format_source(source: Source, *, width: int = 160) -> Text:
    """Format `train.py:12 forward   x = self.wq(x)`; the line number is never shortened."""
    line = f":{source.line}"
    function = f" {sanitize_text(source.function)}" if source.function else ""
    if _MIN_FILE + len(line + function) > width:
        function = ""
    location = shorten(sanitize_text(source.file), max(_MIN_FILE, width - len(line + function)))
    location += line + function
    text = make_text(location, "dim", width=width)
    room = width - len(location) - 2
    if source.text.strip() and room >= _MIN_CODE:
        code = sanitize_text(source.text.strip())
        text.append("  ").append_text(Text(_truncate(code, room), "dim italic"))
    return text


def _truncate(code: str, width: int) -> str:
    return code if len(code) <= width else code[: width - 1] + "…"


# A callable renders prose for a given width.
