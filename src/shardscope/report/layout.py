"""The look that all sections share."""

from __future__ import annotations

from rich.text import Text

from shardscope.report.names import make_inert, shorten

__all__ = ["draw_level", "format_bar", "format_share", "make_text", "make_title", "plural"]

_BAR_CELLS = 8
_LEVELS = " ▁▂▃▄▅▆▇█"
_LITTLE = "·"


def make_text(text: str, style: str = "", *, width: int = 400) -> Text:
    """A stranger's text as rich text: no markup, no escapes, no endless lines."""
    return Text(shorten(make_inert(text), width), style)


def make_title(title: str, note: str = "") -> Text:
    """A section's first line, with a blank line above; either part may be a stranger's."""
    line = Text("\n").append(make_inert(title), "bold")
    return line.append(f"  {make_inert(note)}", "dim") if note else line


def format_share(part: int, whole: int) -> str:
    """A share as a percentage: `12%`, `<1%`; of nothing there is none."""
    if not whole:
        return ""
    share = part / whole
    return "<1%" if 0 < share < 0.01 else f"{share:.0%}"


def format_bar(part: int, whole: int) -> Text:
    """A share as a bar, which a file that says more than all of it cannot make longer."""
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
