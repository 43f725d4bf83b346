"""A table that renders only the visible rows, for recordings with millions of them."""

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

from shardscope.record.text import sanitize_text
from shardscope.report.text.style import shorten

_GAP = 1
_HEADER = 1  # lines of the header


class RowsColumn(Struct, frozen=True):
    """A column; columns with a `share` divide the room that other columns leave.

    If there is not enough room, columns of the lowest `rank` are kept.
    """

    header: str
    width: int
    rank: int = 0
    share: int = 0
    is_number: bool = False


Cells = Mapping[str, str]


@final
class Rows(ScrollView, can_focus=True):
    """A header, and rows with a cursor."""

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
        """The user moved the cursor to another row."""

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
        self._records: Sequence[Any] = ()
        self._read: Callable[[Any], Cells] = lambda _: {}
        self.num_created = 0  # rows rendered

    def show(
        self, records: Sequence[Any], read: Callable[[Any], Cells], *, empty: str = ""
    ) -> None:
        """Show a row for each record; `read` converts a record to cells."""
        self._records, self._read = records, read
        self._empty = empty or self._empty
        self.cursor = 0
        self._resize()
        self.scroll_home(animate=False)
        self.refresh()

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, row: int) -> Any:
        return self._records[row]

    @property
    def _room(self) -> int:
        """Width of a line without the scroll bar."""
        return self.scrollable_content_region.width

    def _resize(self) -> None:
        self.virtual_size = Size(0, len(self._records) + _HEADER)

    def on_resize(self) -> None:
        """Choose the columns for the new width."""
        self._resize()
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Render a line; the header stays while rows scroll."""
        width = self._room
        base = self.rich_style
        if not self._records:
            style = base + self.get_component_rich_style("rows--empty")
            lines = wrap(sanitize_text(self._empty), max(1, width))
            return _make_strip(lines[y] if y < len(lines) else "", style, width)
        if y == 0:
            names = {key: column.header for key, column in self._columns.items()}
            return self._draw(names, base + self.get_component_rich_style("rows--header"))
        row = y - _HEADER + round(self.scroll_offset.y)
        if not 0 <= row < len(self._records):
            return Strip.blank(width, base)
        style = base + self.get_component_rich_style("rows--cursor") if row == self.cursor else base
        self.num_created += 1
        return self._draw(self._read(self._records[row]), style)

    def _draw(self, cells: Cells, style: Style) -> Strip:
        width = self._room
        texts = []
        for key, room in self._share_out(width).items():
            text = shorten(sanitize_text(cells.get(key, "")), room)
            blank = " " * (room - cell_len(text))
            texts.append(blank + text if self._columns[key].is_number else text + blank)
        return _make_strip((" " * _GAP).join(texts), style, width)

    def _share_out(self, width: int) -> dict[str, int]:
        """Return the columns that fit, with their widths."""
        shown = list(self._columns)
        while len(shown) > 1 and self._sum_widths(shown) > width:
            shown.remove(max(shown, key=lambda key: self._columns[key].rank))
        rest = max(0, width - self._sum_widths(shown))
        shares = sum(self._columns[key].share for key in shown)
        return {
            key: self._columns[key].width + (rest * self._columns[key].share // max(1, shares))
            for key in shown
        }

    def _sum_widths(self, shown: Sequence[str]) -> int:
        return sum(self._columns[key].width + _GAP for key in shown) - _GAP

    def action_move(self, by: int) -> None:
        """Move the cursor up or down."""
        self._go(self.cursor + by)

    def action_page(self, by: int) -> None:
        """Move the cursor by a page."""
        self._go(self.cursor + by * max(1, self.size.height - _HEADER - 1))

    def action_first(self) -> None:
        """Move the cursor to the first row."""
        self._go(0)

    def action_last(self) -> None:
        """Move the cursor to the last row."""
        self._go(len(self._records) - 1)

    def action_select(self) -> None:
        """Send a message that the row under the cursor was selected."""
        if self._records:
            self.post_message(self.Selected(self, self.cursor))

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to the clicked row; a click on the cursor's row selects it."""
        offset = event.get_content_offset(self)
        if offset is None or offset.y < _HEADER:
            return
        row = offset.y - _HEADER + round(self.scroll_offset.y)
        if row < len(self._records):
            self._go(row)
            if event.chain > 1:
                self.action_select()

    def on_focus(self) -> None:
        """Highlight the row under the cursor."""
        if self._records:
            self.post_message(self.Highlighted(self, self.cursor))

    def _go(self, row: int) -> None:
        if not self._records:
            return
        self.cursor = min(max(0, row), len(self._records) - 1)
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
