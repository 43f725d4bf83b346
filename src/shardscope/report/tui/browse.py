"""The panes that belong together: modules, their collectives, what is wrong, and details."""

from __future__ import annotations

from typing import ClassVar, final

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical, VerticalScroll
from textual.widgets import Input, Static, Tree

from shardscope.record import Collective, Finding, Gap, describe_cause
from shardscope.report.layout import make_text, plural
from shardscope.report.tui.call_list import CallList
from shardscope.report.tui.module_tree import ModuleTree
from shardscope.report.tui.outline import Place
from shardscope.report.tui.rows import Rows, RowsColumn
from shardscope.report.tui.walk import Walk
from shardscope.report.units import format_bytes

__all__ = ["Browse"]

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
    """One recording; what is selected in one pane is shown in the others."""

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

    def __init__(self, walk: Walk, *, id: str) -> None:
        super().__init__(id=id)
        self._walk = walk

    def compose(self) -> ComposeResult:
        """Modules and problems on the left, collectives and details on the right."""
        with Vertical(id="left"):
            yield ModuleTree(id="tree")
            yield Input(placeholder="name or class of a module", id="search")
            yield Rows(_PROBLEM_COLUMNS, empty=self._walk.checks, id="problems")
        with Vertical(id="right"):
            yield Rows(_choose_columns(self._walk.calls), empty=self._explain_none(), id="calls")
            with VerticalScroll(id="details"):
                yield Static(id="details-text", markup=False)

    def on_mount(self) -> None:
        """Fill the panes; the tree is where one begins."""
        problems = self._walk.problems
        self._problems.show(problems, _read_problem)
        self._problems.set_class(not problems, "-none")
        self._problems.can_focus = bool(problems)
        self._problems.border_title = _count_problems(problems)
        self._tree.border_title = "Modules" if self._walk.outline.tops else "No modules"
        self._calls.border_title = "Collectives"
        self._details.border_title = "Details"
        self._tree.show(self._walk.outline)
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

    def on_tree_node_highlighted(self, event: Tree.NodeHighlighted[Place]) -> None:
        """Another module: its collectives, and what is known of it."""
        if event.node.data is not None:
            self._walk.place = event.node.data
            self._show_calls()
            self._show_details(event.node.data)

    def on_rows_highlighted(self, event: Rows.Highlighted) -> None:
        """Another collective, finding or gap."""
        self._show_details(event.rows[event.row])

    def on_rows_selected(self, event: Rows.Selected) -> None:
        """Go to the module that it is about."""
        thing = event.rows[event.row]
        chain = self._walk.find_place(thing)
        if chain is None:
            self.notify("It belongs to no module.")
            return
        self._tree.reveal(chain)
        if isinstance(thing, Collective):
            self._tree.focus()

    def _show_details(self, thing: Place | Collective | Finding | Gap) -> None:
        describer = self._walk.details
        if isinstance(thing, Place):
            shown = describer.describe_place(thing)
        elif isinstance(thing, Collective):
            shown = describer.describe_call(thing)
        else:
            shown = describer.describe_problem(thing)
        self.query_one("#details-text", Static).update(shown)
        self._details.scroll_home(animate=False)

    def _show_calls(self) -> None:
        place = self._walk.place
        if place is None:
            return
        found = self._walk.list_calls()
        self._calls.show(found, self._read_call, empty=self._explain_none())
        title = f"{plural(len(found), 'collective')} of {place.name or 'all modules'}"
        self._calls.border_title = make_text(title, width=_MAX_TITLE)
        self._calls.border_subtitle = make_text(self._walk.words, width=_MAX_TITLE)

    def _explain_none(self) -> str:
        if not self._walk.calls.choices["kind"]:
            return _NONE_ISSUED if self._walk.is_traced else _NO_CALLS
        return _NONE_LEFT if self._walk.is_filtered else _NONE_HERE

    def _read_call(self, call: Collective) -> dict[str, str]:
        return {
            "order": f"{call.order:,}",
            "rank": f"{call.rank:,}",
            "phase": str(call.phase),
            "kind": str(call.kind),
            "axis": self._walk.calls.name_axis(call),
            "input": format_bytes(call.input_bytes),
            "sent": format_bytes(call.wire_bytes),
            "module": "" if call.owner is None else call.owner or "(root)",
            "cause": describe_cause(call.cause),
        }

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """A key that could not change anything is not offered."""
        if action == "filter":
            return len(self._walk.calls.choices[str(parameters[0])]) > 1
        return True

    def action_filter(self, facet: str) -> None:
        """Keep collectives of the next value of a facet."""
        self._walk.filter_next(facet)
        self._show_calls()

    def action_clear(self) -> None:
        """Keep all collectives again."""
        self._walk.clear_filter()
        self._show_calls()

    def action_sort(self) -> None:
        """Sort collectives by the next column."""
        self._walk.sort_next()
        self._show_calls()

    def action_reverse(self) -> None:
        """Turn the order of collectives round."""
        self._walk.turn_round()
        self._show_calls()

    def action_fold(self) -> None:
        """Fold layers that are alike, or show each; stay where one is."""
        chain = self._walk.fold()
        self._tree.show(self._walk.outline)
        if chain is not None:
            self._tree.reveal(chain)

    def action_search(self) -> None:
        """Open the line to type into."""
        self._search.add_class("-open")
        self._search.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Go to the first match while it is typed."""
        self._walk.search(event.value)
        self._show_match()

    def on_input_submitted(self) -> None:
        """Stay at the match."""
        self._close_search()

    def on_key(self, event: events.Key) -> None:
        """Escape leaves the search."""
        if event.key == "escape" and self._search.has_focus:
            event.stop()
            self._close_search()

    def _close_search(self) -> None:
        self._search.remove_class("-open")
        self._tree.focus()

    def action_next_match(self, by: int) -> None:
        """Go to the next match, or the one before."""
        self._walk.move_match(by)
        self._show_match()

    def _show_match(self) -> None:
        self._tree.border_subtitle = make_text(self._walk.match_words, width=_MAX_TITLE)
        if self._walk.match is not None:
            self._tree.reveal(self._walk.match)


def _choose_columns(calls: CallList) -> dict[str, RowsColumn]:
    """Names as wide as they get; a rank only where there are several."""
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
