"""Elements of all sections: text, titles, bars, source lines, and tables that fit the terminal.

Names are shortened and columns hidden to fit; numbers are never shortened.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, final

from msgspec import Struct
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.containers import Lines
from rich.table import Table
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
