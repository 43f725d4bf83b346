"""Markdown of bounded length, with untrusted text escaped."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar, final

from shardscope.record.text import sanitize_text
from shardscope.report.text.style import shorten

_Item = TypeVar("_Item")

MAX_BYTES = 60_000  # of GitHub's 65,536 characters
_RESERVE = 400  # for the lines that state what is left out


@final
class BoundedMarkdown:
    """A Markdown document of bounded size; rows that do not fit are counted."""

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self._room = max_bytes - _RESERVE
        self._lines: list[str] = []
        self._num_left_out = 0

    def add(self, *lines: str) -> None:
        """Add a block followed by a blank line, or nothing if it does not fit."""
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
        """Add a table with a row per item; headings that start with `>` are of numeric columns."""
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
        """Add a bulleted list of at most `most` items."""
        self._add_items([], items, lambda item: f"- {make_line(item)}", most)

    def render(self) -> str:
        """Return the document, with a note on how many lines did not fit."""
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


_MAX_NAME = 160
_MAX_PROSE = 600
_NOT_IN_CODE = frozenset("`|\\")  # a table ends its cell at a pipe, in code too
# Backslashes and pipes are entities: Markdown readers differ in how tables treat escaped ones.
_ENTITIES = re.compile(r"[\\|`<>&$]")
_ESCAPED = re.compile(r"[*_~\[\]!#]")
# The last matches names that some readers link as domains: aten.mm, train.py.
_LINKED = re.compile(
    r"(@|#|:(?=//)|\bwww(?=\.)|\bGH(?=-)|(?<=\w)\.(?=[a-z]{2}(?![\w.])))", re.IGNORECASE
)
_GAP = "\N{ZERO WIDTH SPACE}"
# Characters at the start of a line that make it a list, a heading or a rule.
_BLOCK = re.compile(r"^(\s*)([+=-])")


def make_code(text: str, *, width: int = _MAX_NAME) -> str:
    """Format a name as code; a dash if it is empty."""
    plain = shorten(sanitize_text(text), width)
    if not plain.strip():
        return "–"
    if not _NOT_IN_CODE & set(plain):
        return f"`{plain}`"
    return f"<code>{_escape(plain)}</code>"


def make_prose(text: str, *, width: int = _MAX_PROSE) -> str:
    """Escape a sentence, so that it has no markup, links or mentions."""
    plain = _LINKED.sub(rf"\1{_GAP}", shorten(sanitize_text(text), width))
    return _BLOCK.sub(r"\1\\\2", _escape(plain))


def _escape(text: str) -> str:
    escaped = _ENTITIES.sub(lambda match: f"&#{ord(match[0])};", text)
    return _ESCAPED.sub(_escape_punctuation, escaped)


def _escape_punctuation(match: re.Match[str]) -> str:
    is_entity = match.string[match.start() - 1 : match.start()] == "&"  # written by `_escape`
    return match[0] if is_entity else f"\\{match[0]}"
