"""Makes texts safe to print: sanitizes untrusted text, and describes errors in one line.

A terminal obeys control characters, a reader is misled by characters that change the direction of
text, and a CI runner takes lines such as `::error::…` and `##[error]…` in a log for its commands.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any, TextIO, final

from shardscope.errors import ShardscopeError

SIMULATION_TIME = "time of the simulation, not of a run"
"""What every view says beside times that were measured in a simulated world."""

_MAX_ERROR = 200  # characters of a message that is not shardscope's
_MAX_EXCERPT = 120  # characters of an untrusted file that a message repeats
# Control, format (bidi overrides), surrogate and private characters, line and paragraph breaks.
_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
# GitHub's runner reads `::name::` at the start of a line, after blanks, and `##[name]` anywhere;
# that of Azure reads `##vso[name]`. A line may be broken at any blank of a text.
_COMMAND = re.compile(r"(?:^|(?<=\s)):(?=:)|#(?=#(?:vso)?\[)")
_COMMAND_LINE = re.compile(r"^(?P<blanks>\s*):(?=:)")
_MARK = re.compile(r"#(?=#(?:vso)?\[)")


def sanitize_text(text: str) -> str:
    """Put text on one line, and escape what a terminal or a CI runner might interpret.

    Args:
        text: The text.

    Examples:
        >>> sanitize_text("::error::x")
    """
    escaped = escape_controls(text)
    if "::" not in escaped and "##" not in escaped:
        return escaped
    return _COMMAND.sub(_escape_mark, escaped)


def escape_controls(text: str) -> str:
    """Escape control and bidirectional characters, so that text cannot control a terminal or page.

    Args:
        text: The text.

    Examples:
        >>> escape_controls("a\x1bb")
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(char) if is_unsafe(char) else char for char in text)


def is_unsafe(char: str) -> bool:
    """Whether a character is a control, format or similar character that is not displayed."""
    return unicodedata.category(char) in _UNSAFE


def guard_line(line: str) -> str:
    """Escape the start of a laid-out line that a CI runner would take for a command.

    Args:
        line: The line.

    Examples:
        >>> guard_line("::error::x")
    """
    if "::" in line:
        line = _COMMAND_LINE.sub(r"\g<blanks>\\x3a", line)
    return _MARK.sub(_escape_mark, line) if "##" in line else line


def _escape(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")


def _escape_mark(match: re.Match[str]) -> str:
    return f"\\x{ord(match[0]):02x}"


@final
class GuardedFile:
    """A text file that sanitizes each line as it is written."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._has_begun = False  # whether the current line has content

    def write(self, text: str) -> int:
        """Write text, which may end in the middle of a line."""
        begun, *lines_after = text.split("\n")
        # Text in the middle of a line is exempt from checks that apply to the start of a line.
        lines = [guard_line(f"x{begun}")[1:] if self._has_begun else guard_line(begun)]
        lines += map(guard_line, lines_after)
        self._has_begun = bool(lines[-1]) or (self._has_begun and not lines_after)
        self._file.write("\n".join(lines))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def describe_error(error: BaseException) -> str:
    """The type and the first line of an exception; a long message ends with "…".

    Our own messages are never shortened: their last words are the remedy.

    Examples:
        >>> describe_error(ZeroDivisionError("division by zero"))
        'ZeroDivisionError: division by zero'
    """
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # noqa: BLE001 - an exception's own __str__ may fail
        lines = []
    if not lines:
        return type(error).__name__
    line = lines[0]
    if len(line) > _MAX_ERROR and not isinstance(error, ShardscopeError):
        line = f"{line[:_MAX_ERROR].rpartition(' ')[0] or line[:_MAX_ERROR]}…"
    return f"{type(error).__name__}: {line}"


def replace_surrogates(text: str) -> str:
    r"""Replace lone surrogates (as in file names that are not UTF-8), which JSON cannot contain.

    Args:
        text: The text.

    Examples:
        >>> replace_surrogates("caf\udce9")
    """
    if text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def excerpt(text: str) -> str:
    """The start of an untrusted text, sanitized, to be repeated in a message."""
    return sanitize_text(text if len(text) <= _MAX_EXCERPT else f"{text[:_MAX_EXCERPT]}…")
