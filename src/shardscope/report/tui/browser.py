"""A recording in a terminal of its own: a pane to walk through it, and the views."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, final, get_args

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static, TabbedContent, TabPane

from shardscope.record import Recording
from shardscope.report.heading import describe_world
from shardscope.report.mentioned import add_mentioned_modules
from shardscope.report.tui.browse import Browse
from shardscope.report.tui.help import HelpScreen
from shardscope.report.tui.walk import Walk
from shardscope.report.views import Subject, Views

__all__ = ["Browser"]

_SUBJECTS: list[Subject] = [one for one in get_args(Subject) if one != "modules"]
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
    """One recording; it is read and never changed."""

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
        # Of the terminal's own colours Textual can leave out all; of its own it makes greys.
        super().__init__(ansi_color=not has_colors)
        self.animation_level = "none"
        recording = add_mentioned_modules(recording)
        self._recording = recording
        self._views = Views(recording)
        self._drawn: set[str] = set()
        # Here, and not when the screen is drawn, which would stay empty for as long.
        self._walk = Walk(recording)

    def compose(self) -> ComposeResult:
        """What ran, the tabs, the keys."""
        # Without its own colours, which a light theme could not show.
        world = Text(describe_world(self._recording).plain, "bold")
        yield Static(world, id="world", markup=False)
        with TabbedContent():
            with TabPane("Modules", id="modules"):
                yield Browse(self._walk, id="browse")
            for subject in _SUBJECTS:
                title = _TITLES.get(subject, subject.capitalize())
                with TabPane(title, id=subject), VerticalScroll(classes="view"):
                    yield Static(id=f"{subject}-view", markup=False)
        yield Footer()

    def on_resize(self, event: events.Resize) -> None:
        """Keys stand closer where there is less room."""
        self.query_one(Footer).compact = event.size.width < _FEW_COLUMNS

    def on_tabbed_content_tab_activated(self, event: TabbedContent.TabActivated) -> None:
        """Draw a view when it is first looked at."""
        for subject in _SUBJECTS:
            if subject == event.pane.id and subject not in self._drawn:
                self._drawn.add(subject)
                view = self.query_one(f"#{subject}-view", Static)
                view.loading = True
                self.run_worker(partial(self._draw, subject, view), thread=True)

    def _draw(self, subject: Subject, view: Static) -> None:
        """Beside the screen, which stays alive; a large recording takes a while."""
        drawn = self._views.render(subject)
        self.call_from_thread(view.update, drawn)
        self.call_from_thread(setattr, view, "loading", False)

    def action_show_tab(self, name: str) -> None:
        """Go to a tab, and into it."""
        self.query_one(TabbedContent).active = name
        inside = "#tree" if name == "modules" else f"#{name} VerticalScroll"
        self.query_one(inside).focus()

    def action_toggle_dark(self) -> None:
        """From dark to light, or back."""
        self.theme = "textual-light" if self.current_theme.dark else "textual-dark"

    def action_help(self) -> None:
        """Show what the keys do."""
        self.push_screen(HelpScreen(_KEYS))
