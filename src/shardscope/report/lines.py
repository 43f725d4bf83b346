"""A source line of the user's program, as much of it as there is room for."""

from __future__ import annotations

from typing import final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from shardscope.record import Source
from shardscope.report.layout import make_text
from shardscope.report.names import make_inert, shorten

__all__ = ["SourceLine", "format_source"]

_MIN_FILE = 12  # characters of a path that identify the file
_MIN_CODE = 16  # characters of code worth showing
_MAX_WIDTH = 120


@final
class SourceLine:
    """A source line on one line, shortened to the width that there is."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield format_source(self._source, width=min(_MAX_WIDTH, options.max_width))


def format_source(source: Source, *, width: int = 160) -> Text:
    """`train.py:12 forward   x = self.wq(x)`; the code is shortened first, the line never."""
    line = f":{source.line}"
    function = f" {make_inert(source.function)}" if source.function else ""
    if _MIN_FILE + len(line + function) > width:
        function = ""
    place = shorten(make_inert(source.file), max(_MIN_FILE, width - len(line + function)))
    place += line + function
    text = make_text(place, "dim", width=width)
    room = width - len(place) - 2
    if source.text.strip() and room >= _MIN_CODE:
        code = make_inert(source.text.strip())
        text.append("  ").append_text(Text(_cut(code, room), "dim italic"))
    return text


def _cut(code: str, width: int) -> str:
    return code if len(code) <= width else code[: width - 1] + "…"
