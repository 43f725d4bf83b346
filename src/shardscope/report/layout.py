"""The look that all sections share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import final

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from shardscope.report.names import make_inert, shorten

__all__ = ["ByWidth", "format_bar", "make_table", "make_text", "make_title", "plural"]

_BAR_CELLS = 8
_NOT_NUMBERS = ("share", "cause")


@final
class ByWidth:
    """Something that is laid out once it is known how wide the terminal is."""

    def __init__(self, render: Callable[[int], RenderableType]) -> None:
        self._render = render

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._render(options.max_width)


def make_text(text: str, style: str = "", *, width: int = 400) -> Text:
    """A stranger's text as rich text: no markup, no escapes, no endless lines."""
    return Text(shorten(make_inert(text), width), style)


def make_title(title: str, note: str = "") -> Text:
    """A section's first line, with a blank line above."""
    line = Text("\n").append(title, "bold")
    return line.append(f"  {note}", "dim") if note else line


def make_table(
    headers: Sequence[str], rows: Iterable[Sequence[Text | str]], *, num_names: int = 1
) -> Table:
    """A table without lines: the first columns are names, the rest numbers, shares and prose.

    Where it is too wide, names are cut; a number never is.
    """
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for index, header in enumerate(headers):
        is_number = index >= num_names and header not in _NOT_NUMBERS
        table.add_column(
            Text(header, no_wrap=True),
            justify="right" if is_number else "left",
            no_wrap=is_number,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(_cut_off(cell) for cell in row[:num_names]), *row[num_names:])
    return table


def _cut_off(cell: Text | str) -> Text:
    name = Text(cell) if isinstance(cell, str) else cell
    name.no_wrap, name.overflow = True, "ellipsis"
    return name


def format_bar(part: int, whole: int) -> Text:
    """A share as a percentage and a bar."""
    share = part / whole if whole else 0.0
    bar = "█" * round(share * _BAR_CELLS)
    return Text.assemble((f"{share:4.0%} ", ""), (bar.ljust(_BAR_CELLS), "cyan"))


def plural(count: int, noun: str, ending: str = "s") -> str:
    """`1 rank`, `1,024 ranks`."""
    return f"{count:,} {noun}{'' if count == 1 else ending}"
