"""A stranger's text in Markdown: shown as it is, and nothing else.

GitHub looks for mentions, issues and links after Markdown is done, so that a backslash does not
help; in code it does not look.
"""

from __future__ import annotations

import re

from shardscope.report.names import make_inert, shorten

__all__ = ["make_code", "make_prose"]

_MAX_NAME = 160
_MAX_PROSE = 600
_NOT_IN_CODE = frozenset("`|\\")  # a table ends its cell at a pipe, in code too
# Backslashes and pipes among the first: what tables make of an escaped one depends on the reader.
_ENTITIES = re.compile(r"[\\|`<>&$]")
_ESCAPED = re.compile(r"[*_~\[\]!#]")
# The last is what some readers take for a domain: aten.mm, train.py.
_LINKED = re.compile(
    r"(@|#|:(?=//)|\bwww(?=\.)|\bGH(?=-)|(?<=\w)\.(?=[a-z]{2}(?![\w.])))", re.IGNORECASE
)
_GAP = "\N{ZERO WIDTH SPACE}"
# What makes a list, a heading or a rule of a line that begins with it.
_BLOCK = re.compile(r"^(\s*)([+=-])")


def make_code(text: str, *, width: int = _MAX_NAME) -> str:
    """A name as code; a dash where it is empty."""
    plain = shorten(make_inert(text), width)
    if not plain.strip():
        return "–"
    if not _NOT_IN_CODE & set(plain):
        return f"`{plain}`"
    return f"<code>{_escape(plain)}</code>"


def make_prose(text: str, *, width: int = _MAX_PROSE) -> str:
    """A sentence, without markup, links or mentions."""
    plain = _LINKED.sub(rf"\1{_GAP}", shorten(make_inert(text), width))
    return _BLOCK.sub(r"\1\\\2", _escape(plain))


def _escape(text: str) -> str:
    inert = _ENTITIES.sub(lambda found: f"&#{ord(found[0])};", text)
    return _ESCAPED.sub(_escape_punctuation, inert)


def _escape_punctuation(found: re.Match[str]) -> str:
    is_entity = found.string[found.start() - 1 : found.start()] == "&"  # ours: others are entities
    return found[0] if is_entity else f"\\{found[0]}"
