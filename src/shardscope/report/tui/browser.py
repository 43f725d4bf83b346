"""The terminal application: the linked panes, the views, and help on keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import ClassVar, final, get_args

from rich.table import Table
from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Input, Static, TabbedContent, TabPane, Tree
from textual.widgets.tree import TreeNode

from shardscope.record import Collective, Finding, Gap, Recording, describe_cause
from shardscope.record.units import format_bytes, format_count, plural
from shardscope.report.model.select import infer_modules
from shardscope.report.model.traffic_totals import format_spread
from shardscope.report.text.heading import describe_world
from shardscope.report.text.style import make_text
from shardscope.report.text.views import ViewName, Views
from shardscope.report.tui.browser_state import BrowserState, CallList
from shardscope.report.tui.module_index import Chain, ModuleEntry, ModuleIndex
from shardscope.report.tui.rows import Rows, RowsColumn

_MAX_LABEL = 60


@final
class ModuleTree(Tree[ModuleEntry]):
    """A tree widget of the entries of a module index."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right", "open", "Open", show=False),
        Binding("left", "close", "Close", show=False),
    ]

    def __init__(self, *, id: str) -> None:
        super().__init__(Text("modules"), id=id)
        self.show_root = False
        self.guide_depth = 2
        self.auto_expand = False
        self._index: ModuleIndex | None = None
        self.num_created = 0  # tree nodes

    def show(self, index: ModuleIndex) -> None:
        """Show the root entries of an index, the first expanded."""
        self._index = index
        self.clear()
        self.root.expand()
        self._add(self.root, index.tops)
        for node in self.root.children[:1]:
            self._open(node)
        self.move_cursor(self.root.children[0] if self.root.children else None)

    def on_tree_node_expanded(self, event: Tree.NodeExpanded[ModuleEntry]) -> None:
        """Create the children, once."""
        self._fill(event.node)

    def _fill(self, node: TreeNode[ModuleEntry]) -> None:
        if self._index is not None and node.data is not None and not node.children:
            self._add(node, self._index.below(node.data))

    def _add(self, node: TreeNode[ModuleEntry], entries: Sequence[ModuleEntry]) -> None:
        for entry in entries:
            node.add(_format_label(entry), entry, allow_expand=bool(entry.node.children))
        self.num_created += len(entries)

    def _open(self, node: TreeNode[ModuleEntry]) -> None:
        self._fill(node)
        node.expand()

    def reveal(self, chain: Chain) -> None:
        """Expand all ancestors of an entry, and move the cursor to it."""
        node = self.root
        for entry in chain:
            self._open(node)
            node = next(child for child in node.children if child.data is entry)
        # The line of a node is known once the tree has been laid out.
        self.call_after_refresh(self.move_cursor, node)

    def action_open(self) -> None:
        """Expand the node under the cursor, or move to its first child."""
        node = self.cursor_node
        if node is None or not node.allow_expand:
            return
        if node.is_expanded and node.children:
            self.move_cursor(node.children[0])
        else:
            self._open(node)

    def action_close(self) -> None:
        """Collapse the node under the cursor, or move to its parent."""
        node = self.cursor_node
        if node is None:
            return
        if node.is_expanded and node.allow_expand:
            node.collapse()
        elif node.parent is not None and node.parent is not self.root:
            self.move_cursor(node.parent)


def _format_label(entry: ModuleEntry) -> Text:
    """Format an entry: `wq  2 · 128 MiB  Linear`."""
    node = entry.node
    words = entry.label or "|".join(node.types) or "model"
    label = make_text(words, "" if entry.label else "bold", width=_MAX_LABEL)
    if entry.repeat > 1:
        label.append(f" ×{entry.repeat:,}", "cyan")
    if node.count().high:
        count = format_spread(node.count(), format_count)
        label.append(f"  {count} · {format_spread(node.wire_bytes(), format_bytes)}", "green")
    if entry.label and node.types:
        label.append_text(make_text(f"  {'|'.join(node.types)}", "dim", width=_MAX_LABEL))
    return label


_MAX_TITLE = 60
_PROBLEM_COLUMNS = {
    "kind": RowsColumn("", 7),
    "rule": RowsColumn("finding or gap", 9, rank=2, share=1),
    "subject": RowsColumn("about", 9, rank=1, share=1),
}
_NO_CALLS = "Collectives were not recorded. Run shardscope trace."
_NONE_ISSUED = "No collectives were issued while it was traced."
_NONE_LEFT = "No collectives here; x clears filters."
_NONE_HERE = "It issued no collectives."


@final
class Browse(Container):
    """The panes of one recording; a selection in one pane updates the others."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "search", "Search", key_display="/"),
        Binding("n", "next_match(1)", "Next match", show=False),
        Binding("N", "next_match(-1)", "Previous match", show=False),
        Binding("f", "fold", "Fold"),
        Binding("p", "filter('phase')", "Phase"),
        Binding("a", "filter('axis')", "Axis"),
        Binding("k", "filter('kind')", "Kind"),
        Binding("r", "filter('rank')", "Rank"),
        Binding("x", "clear", "All"),
        Binding("s", "sort", "Sort"),
        Binding("S", "reverse", "Turn round", show=False),
    ]

    def __init__(self, state: BrowserState, *, id: str) -> None:
        super().__init__(id=id)
        self._state = state

    def compose(self) -> ComposeResult:
        """Modules and problems on the left, collectives and details on the right."""
        with Vertical(id="left"):
            yield ModuleTree(id="tree")
            yield Input(placeholder="name or class of a module", id="search")
            yield Rows(_PROBLEM_COLUMNS, empty=self._state.checks, id="problems")
        with Vertical(id="right"):
            yield Rows(_choose_columns(self._state.calls), empty=self._explain_none(), id="calls")
            with VerticalScroll(id="details"):
                yield Static(id="details-text", markup=False)

    def on_mount(self) -> None:
        """Fill the panes and focus the tree."""
        problems = self._state.problems
        self._problems.show(problems, _read_problem)
        self._problems.set_class(not problems, "-none")
        self._problems.can_focus = bool(problems)
        self._problems.border_title = _count_problems(problems)
        self._tree.border_title = "Modules" if self._state.index.tops else "No modules"
        self._calls.border_title = "Collectives"
        self._details.border_title = "Details"
        self._tree.show(self._state.index)
        self._tree.focus()

    @property
    def _tree(self) -> ModuleTree:
        return self.query_one("#tree", ModuleTree)

    @property
    def _calls(self) -> Rows:
        return self.query_one("#calls", Rows)

    @property
    def _problems(self) -> Rows:
        return self.query_one("#problems", Rows)

    @property
    def _details(self) -> VerticalScroll:
        return self.query_one("#details", VerticalScroll)

    @property
    def _search(self) -> Input:
        return self.query_one("#search", Input)

    def on_tree_node_highlighted(self, event: Tree.NodeHighlighted[ModuleEntry]) -> None:
        """Show the collectives and details of another module."""
        if event.node.data is not None:
            self._state.entry = event.node.data
            self._show_calls()
            self._show_details(event.node.data)

    def on_rows_highlighted(self, event: Rows.Highlighted) -> None:
        """Show another collective, finding or gap."""
        self._show_details(event.rows[event.row])

    def on_rows_selected(self, event: Rows.Selected) -> None:
        """Move to the module that the row is about."""
        record = event.rows[event.row]
        chain = self._state.find_entry(record)
        if chain is None:
            self.notify("It belongs to no module.")
            return
        self._tree.reveal(chain)
        if isinstance(record, Collective):
            self._tree.focus()

    def _show_details(self, record: ModuleEntry | Collective | Finding | Gap) -> None:
        describer = self._state.details
        if isinstance(record, ModuleEntry):
            shown = describer.describe_entry(record)
        elif isinstance(record, Collective):
            shown = describer.describe_call(record)
        else:
            shown = describer.describe_problem(record)
        self.query_one("#details-text", Static).update(shown)
        self._details.scroll_home(animate=False)

    def _show_calls(self) -> None:
        entry = self._state.entry
        if entry is None:
            return
        calls = self._state.list_calls()
        self._calls.show(calls, self._read_call, empty=self._explain_none())
        title = f"{plural(len(calls), 'collective')} of {entry.name or 'all modules'}"
        self._calls.border_title = make_text(title, width=_MAX_TITLE)
        self._calls.border_subtitle = make_text(self._state.words, width=_MAX_TITLE)

    def _explain_none(self) -> str:
        if not self._state.calls.choices["kind"]:
            return _NONE_ISSUED if self._state.is_traced else _NO_CALLS
        return _NONE_LEFT if self._state.is_filtered else _NONE_HERE

    def _read_call(self, call: Collective) -> dict[str, str]:
        return {
            "order": f"{call.order:,}",
            "rank": f"{call.rank:,}",
            "phase": str(call.phase),
            "kind": str(call.kind),
            "axis": self._state.calls.name_axis(call),
            "input": format_bytes(call.input_bytes),
            "sent": format_bytes(call.wire_bytes),
            "module": "" if call.owner is None else call.owner or "(root)",
            "cause": describe_cause(call.cause),
        }

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Hide keys that would have no effect."""
        if action == "filter":
            return len(self._state.calls.choices[str(parameters[0])]) > 1
        return True

    def action_filter(self, facet: str) -> None:
        """Show only collectives with the next value of a facet."""
        self._state.filter_next(facet)
        self._show_calls()

    def action_clear(self) -> None:
        """Show all collectives again."""
        self._state.clear_filter()
        self._show_calls()

    def action_sort(self) -> None:
        """Sort collectives by the next column."""
        self._state.sort_next()
        self._show_calls()

    def action_reverse(self) -> None:
        """Reverse the order of collectives."""
        self._state.reverse_sort()
        self._show_calls()

    def action_fold(self) -> None:
        """Fold identical layers or show each of them; the cursor stays on its module."""
        chain = self._state.fold()
        self._tree.show(self._state.index)
        if chain is not None:
            self._tree.reveal(chain)

    def action_search(self) -> None:
        """Open the search input."""
        self._search.add_class("-open")
        self._search.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Move to the first match while the user types."""
        self._state.search(event.value)
        self._show_match()

    def on_input_submitted(self) -> None:
        """Close the search and stay at the match."""
        self._close_search()

    def on_key(self, event: events.Key) -> None:
        """Close the search on Escape."""
        if event.key == "escape" and self._search.has_focus:
            event.stop()
            self._close_search()

    def _close_search(self) -> None:
        self._search.remove_class("-open")
        self._tree.focus()

    def action_next_match(self, by: int) -> None:
        """Move to the next or previous match."""
        self._state.move_match(by)
        self._show_match()

    def _show_match(self) -> None:
        self._tree.border_subtitle = make_text(self._state.match_words, width=_MAX_TITLE)
        if self._state.match is not None:
            self._tree.reveal(self._state.match)


def _choose_columns(calls: CallList) -> dict[str, RowsColumn]:
    """Choose the columns; ranks are shown only if there are several."""
    longest = max(map(len, calls.choices["axis"]), default=4)
    columns = {
        "order": RowsColumn("order", 6, rank=5, is_number=True),
        "rank": RowsColumn("rank", 5, rank=4, is_number=True),
        "phase": RowsColumn("phase", 9, rank=6),
        "kind": RowsColumn("kind", 14),
        "axis": RowsColumn("axis", min(12, max(4, longest)), rank=2),
        "input": RowsColumn("input", 8, rank=7, is_number=True),
        "sent": RowsColumn("sent", 8, rank=1, is_number=True),
        "module": RowsColumn("module", 12, rank=3, share=1),
        "cause": RowsColumn("cause", 20, rank=8, share=2),
    }
    if len(calls.choices["rank"]) < 2:
        del columns["rank"]
    return columns


def _read_problem(problem: Finding | Gap) -> dict[str, str]:
    if isinstance(problem, Gap):
        return {"kind": "gap", "rule": problem.fact, "subject": problem.place}
    return {"kind": str(problem.severity), "rule": problem.rule, "subject": problem.subject}


def _count_problems(problems: list[Finding | Gap]) -> str:
    num_gaps = sum(isinstance(problem, Gap) for problem in problems)
    return f"{plural(len(problems) - num_gaps, 'finding')}, {plural(num_gaps, 'gap')}"


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


_VIEW_NAMES: list[ViewName] = [
    view_name for view_name in get_args(ViewName) if view_name != "modules"
]
_TABS = ["modules", *_VIEW_NAMES]
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
            for view_name in _VIEW_NAMES:
                title = _TITLES.get(view_name, view_name.capitalize())
                with TabPane(title, id=view_name), VerticalScroll(classes="view"):
                    yield Static(id=f"{view_name}-view", markup=False)
        yield Footer()

    def on_resize(self, event: events.Resize) -> None:
        """Show keys closer together on narrow screens."""
        self.query_one(Footer).compact = event.size.width < _FEW_COLUMNS

    def on_tabbed_content_tab_activated(self, event: TabbedContent.TabActivated) -> None:
        """Draw a view when its tab is first opened."""
        for view_name in _VIEW_NAMES:
            if view_name == event.pane.id and view_name not in self._drawn:
                self._drawn.add(view_name)
                view = self.query_one(f"#{view_name}-view", Static)
                view.loading = True
                self.run_worker(partial(self._draw, view_name, view), thread=True)

    def _draw(self, view_name: ViewName, view: Static) -> None:
        """Render the view in a thread, so that the screen stays responsive."""
        drawn = self._views.render(view_name)
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
