"""The look that all sections share."""

from __future__ import annotations

from rich.text import Text

from shardscope.report.names import make_inert, shorten

__all__ = ["format_bar", "format_share", "make_text", "make_title", "plural"]

_BAR_CELLS = 8


def make_text(text: str, style: str = "", *, width: int = 400) -> Text:
    """A stranger's text as rich text: no markup, no escapes, no endless lines."""
    return Text(shorten(make_inert(text), width), style)


def make_title(title: str, note: str = "") -> Text:
    """A section's first line, with a blank line above; either part may be a stranger's."""
    line = Text("\n").append(make_inert(title), "bold")
    return line.append(f"  {make_inert(note)}", "dim") if note else line


def format_share(part: int, whole: int) -> str:
    """A share as a percentage."""
    return f"{part / whole if whole else 0.0:.0%}"


def format_bar(part: int, whole: int) -> Text:
    """A share as a bar, which a file that says more than all of it cannot make longer."""
    cells = round(min(1.0, part / whole) * _BAR_CELLS) if whole else 0
    return Text("█" * cells, "cyan")


def plural(count: int, noun: str, ending: str = "s") -> str:
    """`1 rank`, `1,024 ranks`."""
    return f"{count:,} {noun}{'' if count == 1 else ending}"
