"""Titles, bars, text and source lines that all sections share."""

from __future__ import annotations

import re
from typing import Any, final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.containers import Lines
from rich.text import Text

from shardscope.record import Source
from shardscope.record.text import sanitize_text
from shardscope.report.model.names import shorten

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
