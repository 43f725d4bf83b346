"""Standard output for laid-out text, in which no line becomes a command of a CI runner."""

from __future__ import annotations

from typing import Any, TextIO, final

from shardscope.record import guard_line

__all__ = ["GuardedFile"]


@final
class GuardedFile:
    """A text file that guards each line as it is written; otherwise the file itself."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._has_begun = False  # the line

    def write(self, text: str) -> int:
        """Write text, which need not end with a line."""
        begun, *others = text.split("\n")
        # What goes on with a line may begin with anything but a mark that counts everywhere.
        lines = [guard_line(f"x{begun}")[1:] if self._has_begun else guard_line(begun)]
        lines += map(guard_line, others)
        self._has_begun = bool(lines[-1]) or (self._has_begun and not others)
        self._file.write("\n".join(lines))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
