"""Text, titles and bars that all sections share."""

from __future__ import annotations

import re
from typing import Any, final

from rich.console import Console
from rich.containers import Lines
from rich.text import Text

from shardscope.report.names import make_inert, shorten

__all__ = ["draw_level", "format_bar", "format_share", "make_text", "make_title", "plural"]

_BAR_CELLS = 8
_LEVELS = " ▁▂▃▄▅▆▇█"
_LITTLE = "·"
_PLACE = re.compile(r"(\S+:\d+)(?![\w.:])(\S{0,3})")  # a path, a line number, punctuation


@final
class _Prose(Text):
    """Text in which a path that is wider than a line is shortened, so that `:12` is not split."""

    def wrap(self, console: Console, width: int, *args: Any, **kwargs: Any) -> Lines:
        """Break into lines of at most `width` cells."""
        text: Text = self
        for match in reversed(list(_PLACE.finditer(self.plain))):
            if len(match[0]) > width:
                start, stop = match.span(1)
                place = shorten(match[1], width - len(match[2]))
                text = Text.assemble(text[:start], place, text[stop:])
                text.justify, text.overflow, text.no_wrap = (
                    self.justify,
                    self.overflow,
                    self.no_wrap,
                )
        return Text.wrap(text, console, width, *args, **kwargs)


def make_text(text: str, style: str = "", *, width: int = 400) -> Text:
    """Text of the user's program as rich text: no markup, no escapes, at most `width` cells."""
    return _Prose(shorten(make_inert(text), width), style)


def make_title(title: str, note: str = "") -> Text:
    """A section's first line, with a blank line above; both parts are made safe to print."""
    line = _Prose("\n").append(make_inert(title), "bold")
    return line.append(f"  {make_inert(note)}", "dim") if note else line


def format_share(part: int, whole: int) -> str:
    """A share as a percentage: `12%`, `<1%`; of nothing there is none."""
    if not whole:
        return ""
    share = part / whole
    return "<1%" if 0 < share < 0.01 else f"{share:.0%}"


def format_bar(part: int, whole: int) -> Text:
    """A share as a bar; a file whose part exceeds the whole cannot make it longer."""
    cells = round(min(1.0, part / whole) * _BAR_CELLS) if whole else 0
    return Text("█" * cells, "cyan")


def draw_level(value: int, most: int) -> str:
    """An upright bar in one cell, as high as the value's share of the most, in eighths.

    What is too little for the lowest bar is a dot, which has no height; nothing is a blank.
    """
    if value <= 0 or most <= 0:
        return _LEVELS[0]
    height = round(min(1.0, value / most) * (len(_LEVELS) - 1))
    return _LEVELS[height] if height else _LITTLE


def plural(count: int, noun: str, ending: str = "s") -> str:
    """`1 rank`, `1,024 ranks`."""
    return f"{count:,} {noun}{'' if count == 1 else ending}"
