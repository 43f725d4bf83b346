"""Text from a stranger's program made safe to print, wherever it is printed."""

from __future__ import annotations

import unicodedata

__all__ = ["make_inert"]

# Control, format (bidi overrides), surrogate and private characters, line and paragraph breaks.
_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def make_inert(text: str) -> str:
    """The text on one line, with whatever a terminal might obey written out as an escape."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(char) for char in text)


def _escape(char: str) -> str:
    if unicodedata.category(char) not in _UNSAFE:
        return char
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")
