"""What the keys do, over everything else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, final

from rich.table import Table
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

__all__ = ["HelpScreen"]


@final
class HelpScreen(ModalScreen[None]):
    """A list of keys; any of a few closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q,enter", "dismiss", "Close"),
    ]

    def __init__(self, keys: Iterable[tuple[str, str]]) -> None:
        super().__init__()
        self._keys = tuple(keys)

    def compose(self) -> ComposeResult:
        """One scrolling box."""
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for key, words in self._keys:
            table.add_row(key, words)
        with VerticalScroll(id="help") as box:
            box.border_title = "Keys"
            yield Static(table, markup=False)
