"""Tables that fit the terminal: names are shortened and columns hidden, numbers never shortened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import final

from msgspec import Struct
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from shardscope.report.text.style import shorten_names

_GAP = 2  # cells between two columns
_MIN_NAME = 6  # cells of a name; in deeper trees, the tree lines are dropped


class Branch(Struct, frozen=True):
    """A name in a tree, with the tree lines before it; the name is shortened first."""

    guide: str
    name: Text


# A callable renders prose for a given width.
Cell = Text | str | Branch | Callable[[int], RenderableType]
Row = Mapping[str, Cell]


class ColumnStyle(Enum):
    """How a column is fitted to the width."""

    NAME = "shortened in the middle"
    NUMBER = "never shortened, aligned to the right"
    WORDS = "never shortened, wrapped only where nothing else can give way"
    PROSE = "wrapped, as wide as there is room"


class Column(Struct, frozen=True):
    """A column; names and prose need at least `min_width` cells to be readable.

    `covers` are the keys of columns that this column replaces in narrower layouts.
    """

    header: str
    style: ColumnStyle = ColumnStyle.NUMBER
    min_width: int = 0
    covers: tuple[str, ...] = ()


def narrower_layouts(layout: Sequence[str], *keys: str) -> list[list[str]]:
    """Return the layout, then without the first of the keys, without the first two, and so on."""
    layouts = [list(layout)]
    for key in keys:
        layouts.append([column for column in layouts[-1] if column != key])
    return layouts


@final
class Grid:
    """A table with the first of the layouts that fits; `layouts` has the widest first.

    A layout is a list of column keys. A row may lack a cell for a column. Columns of the widest
    layout that are hidden are named below the table.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        rows: Sequence[Row],
        layouts: Sequence[Sequence[str]],
        *,
        note: str = "",
    ) -> None:
        self._columns = columns
        self._rows = rows
        self._layouts = [[key for key in layout if self._has_content(key)] for layout in layouts]
        self._note = note
        self._wanted = {key: self._measure(key) for layout in layouts for key in layout}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._make_table(options.max_width)
        if self._note:
            yield Text(self._note, "dim")
        hidden = self._list_hidden(options.max_width)
        if hidden:
            at = f"hidden at {options.max_width} columns: {', '.join(hidden)}"
            yield Text(f"{at} (widen the terminal or set COLUMNS)", "dim")

    def _list_hidden(self, width: int) -> list[str]:
        """List headers of the widest layout that are hidden; bars have no header."""
        shown = self._choose_layout(width)
        covered = {*shown, *(key for column in shown for key in self._columns[column].covers)}
        headers = {self._columns[key].header for key in shown}
        missing = [self._columns[key].header for key in self._layouts[0] if key not in covered]
        return [header for header in missing if header and header not in headers]

    def _has_content(self, key: str) -> bool:
        return any(row.get(key, "") for row in self._rows)

    def _measure(self, key: str) -> int:
        """Return the width in cells that a column would need in full."""
        column = self._columns[key]
        if self._is_prose(key):
            return column.min_width
        cells = (_read(row.get(key, "")) for row in self._rows)
        return max([len(column.header), *(cell.cell_len for cell in cells)])

    def _least(self, key: str) -> int:
        wanted = self._wanted[key]
        return wanted if self._is_fixed(key) else min(wanted, self._columns[key].min_width)

    def _choose_layout(self, width: int) -> Sequence[str]:
        for layout in self._layouts:
            if sum(map(self._least, layout)) + _GAP * (len(layout) - 1) <= width:
                return layout
        return self._layouts[-1]

    def _share_out(self, layout: Sequence[str], width: int) -> dict[str, int]:
        """Assign widths: numbers and words in full; names, then prose, share what remains."""
        widths = {key: self._least(key) for key in layout}
        room = width - _GAP * (len(layout) - 1) - sum(widths.values())
        flexible = [key for key in layout if not self._is_fixed(key)]
        words = [key for key in layout if self._columns[key].style is ColumnStyle.WORDS]
        for shrinking in (flexible, words):
            # If even the narrowest layout does not fit, shorten the widest column, then wrap words.
            while room < 0 and any(widths[key] > _MIN_NAME for key in shrinking):
                widths[max(shrinking, key=lambda key: widths[key])] -= 1
                room += 1
        while room < 0 and any(widths[key] > 1 for key in (*flexible, *words)):
            widths[max((*flexible, *words), key=lambda key: widths[key])] -= 1
            room += 1
        # Columns that need least come first, so that others share what remains; prose is last.
        flexible.sort(key=lambda key: (self._is_prose(key), self._wanted[key] - widths[key]))
        names = [key for key in flexible if not self._is_prose(key)]
        for index, key in enumerate(names):
            more = min(self._wanted[key] - widths[key], room // (len(names) - index))
            widths[key] += max(0, more)
            room -= max(0, more)
        if len(flexible) > len(names):
            widths[flexible[-1]] += max(0, room)
        return widths

    def _is_number(self, key: str) -> bool:
        return self._columns[key].style is ColumnStyle.NUMBER

    def _is_fixed(self, key: str) -> bool:
        return self._columns[key].style in (ColumnStyle.NUMBER, ColumnStyle.WORDS)

    def _is_wrapped(self, key: str) -> bool:
        return self._columns[key].style in (ColumnStyle.PROSE, ColumnStyle.WORDS)

    def _is_prose(self, key: str) -> bool:
        return self._columns[key].style is ColumnStyle.PROSE

    def _make_table(self, width: int) -> Table:
        layout = self._choose_layout(width)
        widths = self._share_out(layout, width)
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, _GAP, 0, 0))
        for key in layout:
            column = self._columns[key]
            table.add_column(
                Text(column.header, no_wrap=True),
                justify="right" if self._is_number(key) else "left",
                no_wrap=not self._is_wrapped(key),
                overflow="fold" if self._is_wrapped(key) else "ellipsis",
                width=widths[key],
            )
        cells = [self._fit(key, widths[key]) for key in layout]
        for row in zip(*cells, strict=True):
            table.add_row(*row)
        return table

    def _fit(self, key: str, width: int) -> Sequence[RenderableType]:
        """Return the cells of a column, at most `width` wide."""
        cells = [row.get(key, "") for row in self._rows]
        if self._is_prose(key):
            return [cell(width) if callable(cell) else _read(cell) for cell in cells]
        if any(isinstance(cell, Branch) for cell in cells):
            return [_fit_branch(cell, width) for cell in cells]
        texts = [_read(cell) for cell in cells]
        return texts if self._is_fixed(key) else shorten_names(texts, width)


def _fit_branch(cell: Cell, width: int) -> Text:
    if not isinstance(cell, Branch) or width - len(cell.guide) < _MIN_NAME:
        return shorten_names([_read(cell)], width)[0]
    (name,) = shorten_names([cell.name], width - len(cell.guide))
    return Text(cell.guide, "dim").append_text(name)


def _read(cell: Cell) -> Text:
    if isinstance(cell, Branch):
        return Text(cell.guide, "dim").append_text(cell.name)
    assert isinstance(cell, Text | str), "only prose waits for its width"
    return Text(cell) if isinstance(cell, str) else cell
