"""A table of which only the rows on the screen are made, however many there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from textwrap import wrap
from typing import Any, ClassVar, final

from msgspec import Struct
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from shardscope.report.names import make_inert, shorten

__all__ = ["Rows", "RowsColumn"]

_GAP = 1
_HEADER = 1  # lines


class RowsColumn(Struct, frozen=True):
    """A column. Columns with a `share` divide what room there is; of the others, and where there
    is no room at all, those of the lowest `rank` are kept.
    """

    header: str
    width: int
    rank: int = 0
    share: int = 0
    is_number: bool = False


Cells = Mapping[str, str]


@final
class Rows(ScrollView, can_focus=True):
    """A header and rows, one of which is under the cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", "Up", show=False),
        Binding("down", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home", "first", "First", show=False),
        Binding("end", "last", "Last", show=False),
        Binding("enter", "select", "Select", show=False),
    ]
    COMPONENT_CLASSES: ClassVar[set[str]] = {"rows--header", "rows--cursor", "rows--empty"}

    cursor = reactive(0)

    @final
    class Highlighted(Message):
        """The cursor is on another row, by the user's doing."""

        def __init__(self, rows: Rows, row: int) -> None:
            super().__init__()
            self.rows = rows
            self.row = row

    @final
    class Selected(Message):
        """The user pressed enter on a row, or clicked it twice."""

        def __init__(self, rows: Rows, row: int) -> None:
            super().__init__()
            self.rows = rows
            self.row = row

    def __init__(self, columns: Mapping[str, RowsColumn], *, empty: str, id: str) -> None:
        super().__init__(id=id)
        self._columns = columns
        self._empty = empty
        self._things: Sequence[Any] = ()
        self._read: Callable[[Any], Cells] = lambda _: {}
        self.num_made = 0  # rows, so far

    def show(self, things: Sequence[Any], read: Callable[[Any], Cells], *, empty: str = "") -> None:
        """Rows for these things; `read` makes a row of one."""
        self._things, self._read = things, read
        self._empty = empty or self._empty
        self.cursor = 0
        self._resize()
        self.scroll_home(animate=False)
        self.refresh()

    def __len__(self) -> int:
        return len(self._things)

    def __getitem__(self, row: int) -> Any:
        return self._things[row]

    @property
    def _room(self) -> int:
        """Cells of a line, less those of the scroll bar."""
        return self.scrollable_content_region.width

    def _resize(self) -> None:
        self.virtual_size = Size(0, len(self._things) + _HEADER)

    def on_resize(self) -> None:
        """A wider table has other columns."""
        self._resize()
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """The header stays while the rest is scrolled."""
        width = self._room
        base = self.rich_style
        if not self._things:
            style = base + self.get_component_rich_style("rows--empty")
            lines = wrap(make_inert(self._empty), max(1, width))
            return _make_strip(lines[y] if y < len(lines) else "", style, width)
        if y == 0:
            names = {key: column.header for key, column in self._columns.items()}
            return self._draw(names, base + self.get_component_rich_style("rows--header"))
        row = y - _HEADER + round(self.scroll_offset.y)
        if not 0 <= row < len(self._things):
            return Strip.blank(width, base)
        style = base + self.get_component_rich_style("rows--cursor") if row == self.cursor else base
        self.num_made += 1
        return self._draw(self._read(self._things[row]), style)

    def _draw(self, cells: Cells, style: Style) -> Strip:
        width = self._room
        texts = []
        for key, room in self._share_out(width).items():
            text = shorten(make_inert(cells.get(key, "")), room)
            blank = " " * (room - cell_len(text))
            texts.append(blank + text if self._columns[key].is_number else text + blank)
        return _make_strip((" " * _GAP).join(texts), style, width)

    def _share_out(self, width: int) -> dict[str, int]:
        """The columns that there is room for, and how wide each is."""
        shown = list(self._columns)
        while len(shown) > 1 and self._add_up(shown) > width:
            shown.remove(max(shown, key=lambda key: self._columns[key].rank))
        rest = max(0, width - self._add_up(shown))
        shares = sum(self._columns[key].share for key in shown)
        return {
            key: self._columns[key].width + (rest * self._columns[key].share // max(1, shares))
            for key in shown
        }

    def _add_up(self, shown: Sequence[str]) -> int:
        return sum(self._columns[key].width + _GAP for key in shown) - _GAP

    def action_move(self, by: int) -> None:
        """Move the cursor up or down."""
        self._go(self.cursor + by)

    def action_page(self, by: int) -> None:
        """By as many rows as are seen."""
        self._go(self.cursor + by * max(1, self.size.height - _HEADER - 1))

    def action_first(self) -> None:
        """To the first row."""
        self._go(0)

    def action_last(self) -> None:
        """To the last row."""
        self._go(len(self._things) - 1)

    def action_select(self) -> None:
        """Tell that the row under the cursor was chosen."""
        if self._things:
            self.post_message(self.Selected(self, self.cursor))

    def on_click(self, event: events.Click) -> None:
        """A click goes to the row below it; a second one chooses it."""
        offset = event.get_content_offset(self)
        if offset is None or offset.y < _HEADER:
            return
        row = offset.y - _HEADER + round(self.scroll_offset.y)
        if row < len(self._things):
            self._go(row)
            if event.chain > 1:
                self.action_select()

    def on_focus(self) -> None:
        """What is under the cursor is what is looked at."""
        if self._things:
            self.post_message(self.Highlighted(self, self.cursor))

    def _go(self, row: int) -> None:
        if not self._things:
            return
        self.cursor = min(max(0, row), len(self._things) - 1)
        height = max(1, self.size.height - _HEADER)
        top = round(self.scroll_offset.y)
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False)
        elif self.cursor >= top + height:
            self.scroll_to(y=self.cursor - height + 1, animate=False)
        self.refresh(Region(0, 0, *self.size))
        self.post_message(self.Highlighted(self, self.cursor))


def _make_strip(text: str, style: Style, width: int) -> Strip:
    return Strip([Segment(text, style)]).adjust_cell_length(width, style)
