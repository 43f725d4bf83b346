"""A line of the user's program, as much of it as there is room for."""

from __future__ import annotations

from rich.text import Text

from shardscope.record import Source
from shardscope.report.layout import make_text
from shardscope.report.names import make_inert, shorten

__all__ = ["format_source"]

_MIN_FILE = 12  # characters of a path that tell which it is
_MIN_CODE = 16  # characters of code worth showing


def format_source(source: Source, *, width: int = 160) -> Text:
    """`train.py:12 forward   x = self.wq(x)`; the place matters more than the code."""
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
