"""Markdown that stops growing in time: a comment has room for so much and no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, final

__all__ = ["Paper"]

_Item = TypeVar("_Item")

MAX_BYTES = 60_000  # of GitHub's 65,536 characters
_RESERVE = 400  # for the lines that say what is missing


@final
class Paper:
    """Blocks of lines one below the other; rows that find no room are counted."""

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self._room = max_bytes - _RESERVE
        self._lines: list[str] = []
        self._num_left_out = 0

    def add(self, *lines: str) -> None:
        """A block with a blank line below, or nothing of it."""
        if not self._take("\n".join([*lines, ""])):
            self._num_left_out += 1

    def add_table(
        self,
        header: Sequence[str],
        items: Sequence[_Item],
        make_row: Callable[[_Item], Sequence[str]],
        *,
        most: int | None = None,
    ) -> None:
        """A table with a row for each item; headings that begin with `>` are above numbers."""
        marks = [name.startswith(">") for name in header]
        names = [name.removeprefix(">") for name in header]
        head = [_join(names), _join(["--:" if is_number else "---" for is_number in marks])]
        self._add_items(head, items, lambda item: _join(make_row(item)), most)

    def add_list(
        self,
        items: Sequence[_Item],
        make_line: Callable[[_Item], str],
        *,
        most: int | None = None,
    ) -> None:
        """A list with a dot before each; `most` is how many are shown."""
        self._add_items([], items, lambda item: f"- {make_line(item)}", most)

    def render(self) -> str:
        """All of it, and how much there was no room for."""
        lines = self._lines
        if self._num_left_out:
            count = f"{self._num_left_out:,} {'line' if self._num_left_out == 1 else 'lines'}"
            lines = [*lines, f"*{count} left out for lack of space.*", ""]
        return "\n".join(lines).rstrip("\n") + "\n"

    def _add_items(
        self,
        head: Sequence[str],
        items: Sequence[_Item],
        make_line: Callable[[_Item], str],
        most: int | None,
    ) -> None:
        if head and not self._take("\n".join(head)):
            self._num_left_out += len(items)
            return
        shown = items[:most]
        num_shown = 0
        for item in shown:
            if not self._take(make_line(item)):
                break
            num_shown += 1
        self._num_left_out += len(shown) - num_shown
        if num_shown < len(items):
            self._take(f"\n… {len(items) - num_shown:,} more")
        self._take("")

    def _take(self, text: str) -> bool:
        size = len(text.encode("utf-8", "replace")) + 1
        if size > self._room:
            return False
        self._room -= size
        self._lines.append(text)
        return True


def _join(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
