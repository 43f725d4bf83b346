"""The terminal application: the linked panes, the views, and help on keys."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import ClassVar, final, get_args

from rich.table import Table
from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Static, TabbedContent, TabPane

from shardscope.record import Recording
from shardscope.report.model.select import infer_modules
from shardscope.report.text.heading import describe_world
from shardscope.report.text.views import ViewName, Views
from shardscope.report.tui.browse import Browse
from shardscope.report.tui.walk import BrowserState


@final
class HelpScreen(ModalScreen[None]):
    """A list of keys, with a few keys to close it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q,enter", "dismiss", "Close"),
    ]

    def __init__(self, keys: Iterable[tuple[str, str]]) -> None:
        super().__init__()
        self._keys = tuple(keys)

    def compose(self) -> ComposeResult:
        """A single scrolling box."""
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for key, words in self._keys:
            table.add_row(key, words)
        with VerticalScroll(id="help") as box:
            box.border_title = "Keys"
            yield Static(table, markup=False)


_SUBJECTS: list[ViewName] = [subject for subject in get_args(ViewName) if subject != "modules"]
_TABS = ["modules", *_SUBJECTS]
_TITLES = {"proof": "Correctness"}
_FEW_COLUMNS = 72
_KEYS = (
    ("↑ ↓ PgUp PgDn", "move; Home and End go to the ends"),
    ("→ ← Space", "open and close a module"),
    ("Tab", "go to the next pane"),
    ("Enter", "of a finding or a collective: go to its module"),
    ("/", "search modules by name or class; Enter stays there"),
    ("n N", "next and previous match"),
    ("f", "fold identical layers, or show each"),
    ("p a k r", "collectives of one phase, axis, kind or rank; again: the next"),
    ("x", "all collectives again"),
    ("s S", "sort collectives by another column; reverse the order"),
    (f"1 … {len(_TABS)}", "the tabs"),
    ("d", "dark or light"),
    ("?", "this help"),
    ("q", "quit"),
)


@final
class Browser(App[None]):
    """The application for one recording, which is read and never changed."""

    TITLE = "shardscope"
    CSS_PATH = "browser.tcss"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (_FEW_COLUMNS, "-wide")]  # noqa: RUF012 - as Textual has it
    VERTICAL_BREAKPOINTS = [(0, "-short"), (20, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(number), f"show_tab('{name}')", name.capitalize(), show=False)
            for number, name in enumerate(_TABS, start=1)
        ),
        Binding("d", "toggle_dark", "Dark or light", show=False),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, recording: Recording, *, has_colors: bool = True) -> None:
        # Textual can remove the terminal's own colours; it converts its own colours to grey.
        super().__init__(ansi_color=not has_colors)
        self.animation_level = "none"
        recording = infer_modules(recording)
        self._recording = recording
        self._views = Views(recording)
        self._drawn: set[str] = set()
        # Here, not while the screen is drawn, which would stay empty meanwhile.
        self._state = BrowserState(recording)

    def compose(self) -> ComposeResult:
        """The heading, the tabs and the keys."""
        # Without own colours, which may be invisible in a light theme.
        world = Text(describe_world(self._recording).plain, "bold")
        yield Static(world, id="world", markup=False)
        with TabbedContent():
            with TabPane("Modules", id="modules"):
                yield Browse(self._state, id="browse")
            for subject in _SUBJECTS:
                title = _TITLES.get(subject, subject.capitalize())
                with TabPane(title, id=subject), VerticalScroll(classes="view"):
                    yield Static(id=f"{subject}-view", markup=False)
        yield Footer()

    def on_resize(self, event: events.Resize) -> None:
        """Show keys closer together on narrow screens."""
        self.query_one(Footer).compact = event.size.width < _FEW_COLUMNS

    def on_tabbed_content_tab_activated(self, event: TabbedContent.TabActivated) -> None:
        """Draw a view when its tab is first opened."""
        for subject in _SUBJECTS:
            if subject == event.pane.id and subject not in self._drawn:
                self._drawn.add(subject)
                view = self.query_one(f"#{subject}-view", Static)
                view.loading = True
                self.run_worker(partial(self._draw, subject, view), thread=True)

    def _draw(self, subject: ViewName, view: Static) -> None:
        """Render the view in a thread, so that the screen stays responsive."""
        drawn = self._views.render(subject)
        self.call_from_thread(view.update, drawn)
        self.call_from_thread(setattr, view, "loading", False)

    def action_show_tab(self, name: str) -> None:
        """Open a tab and focus it."""
        self.query_one(TabbedContent).active = name
        inside = "#tree" if name == "modules" else f"#{name} VerticalScroll"
        self.query_one(inside).focus()

    def action_toggle_dark(self) -> None:
        """Switch between dark and light."""
        self.theme = "textual-light" if self.current_theme.dark else "textual-dark"

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(HelpScreen(_KEYS))
