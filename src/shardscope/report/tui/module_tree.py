"""The module tree to walk through; what lies below a module is made when it is opened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, final

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.widgets import Tree
from textual.widgets.tree import TreeNode

from shardscope.report.layout import make_text
from shardscope.report.tui.outline import Chain, Outline, Place
from shardscope.report.units import format_bytes, format_count, format_spread

__all__ = ["ModuleTree"]

_MAX_LABEL = 60


@final
class ModuleTree(Tree[Place]):
    """Places of an outline."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right", "open", "Open", show=False),
        Binding("left", "close", "Close", show=False),
    ]

    def __init__(self, *, id: str) -> None:
        super().__init__(Text("modules"), id=id)
        self.show_root = False
        self.guide_depth = 2
        self.auto_expand = False
        self._outline: Outline | None = None
        self.num_made = 0  # nodes, so far

    def show(self, outline: Outline) -> None:
        """The tops of an outline, the first opened."""
        self._outline = outline
        self.clear()
        self.root.expand()
        self._add(self.root, outline.tops)
        for node in self.root.children[:1]:
            self._open(node)
        self.move_cursor(self.root.children[0] if self.root.children else None)

    def on_tree_node_expanded(self, event: Tree.NodeExpanded[Place]) -> None:
        """Make what lies below, once."""
        self._fill(event.node)

    def _fill(self, node: TreeNode[Place]) -> None:
        if self._outline is not None and node.data is not None and not node.children:
            self._add(node, self._outline.below(node.data))

    def _add(self, node: TreeNode[Place], places: Sequence[Place]) -> None:
        for place in places:
            node.add(_format_label(place), place, allow_expand=bool(place.node.children))
        self.num_made += len(places)

    def _open(self, node: TreeNode[Place]) -> None:
        self._fill(node)
        node.expand()

    def reveal(self, chain: Chain) -> None:
        """Open all that lies above a place, and go there."""
        node = self.root
        for place in chain:
            self._open(node)
            node = next(child for child in node.children if child.data is place)
        # The line of a node is known once the tree has been laid out.
        self.call_after_refresh(self.move_cursor, node)

    def action_open(self) -> None:
        """Open what is under the cursor, or go to the first below it."""
        node = self.cursor_node
        if node is None or not node.allow_expand:
            return
        if node.is_expanded and node.children:
            self.move_cursor(node.children[0])
        else:
            self._open(node)

    def action_close(self) -> None:
        """Close what is under the cursor, or go to what is above it."""
        node = self.cursor_node
        if node is None:
            return
        if node.is_expanded and node.allow_expand:
            node.collapse()
        elif node.parent is not None and node.parent is not self.root:
            self.move_cursor(node.parent)


def _format_label(place: Place) -> Text:
    """`wq  2 · 128 MiB  Linear`"""
    node = place.node
    words = place.label or "|".join(node.types) or "model"
    label = make_text(words, "" if place.label else "bold", width=_MAX_LABEL)
    if place.repeat > 1:
        label.append(f" ×{place.repeat:,}", "cyan")
    if node.count().high:
        count = format_spread(node.count(), format_count)
        label.append(f"  {count} · {format_spread(node.wire_bytes(), format_bytes)}", "green")
    if place.label and node.types:
        label.append_text(make_text(f"  {'|'.join(node.types)}", "dim", width=_MAX_LABEL))
    return label
