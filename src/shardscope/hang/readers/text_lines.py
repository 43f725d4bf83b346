"""Lines of untrusted text: of bounded length, without the marks that launchers put before them."""

from __future__ import annotations

import re
from typing import final

_MAX_CHARS = 4_000  # of a line
_MAX_LINES = 5_000_000
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Marks at the start of a line: torch's and torchrun's of a rank, srun's of a task.
_TORCH_RANK = re.compile(r"^\[rank(?P<rank>\d{1,7})\]:\s?")
_LOCAL_RANK = re.compile(r"^\[[A-Za-z_]\w*?(?P<rank>\d{1,5})\]:\s?")
_TASK = re.compile(r"^\s*(?P<rank>\d{1,7}):\s")
_MIN_TASKS = 0.8  # share of lines that begin with a number where srun labels them


def split_lines(data: bytes) -> list[str]:
    """The lines of a text, without colours, each cut after 4,000 characters."""
    text = data.decode("utf-8", "replace")
    if "\x1b" in text:
        text = _COLOURS.sub("", text)
    # A progress bar overwrites itself: what it shows last is kept.
    lines = text.replace("\r\n", "\n").split("\n", _MAX_LINES)[:_MAX_LINES]
    return [
        line[:_MAX_CHARS] if "\r" not in line else line.rpartition("\r")[2][:_MAX_CHARS]
        for line in lines
    ]


@final
class LineRank:
    """Finds which rank a line of a log is of, by the mark that a launcher has put before it."""

    def __init__(self, lines: list[str]) -> None:
        filled = [line for line in lines[:2_000] if line.strip()]
        num_tasks = sum(1 for line in filled if _TASK.match(line))
        self.has_tasks = bool(filled) and num_tasks >= _MIN_TASKS * len(filled)

    def strip(self, line: str) -> tuple[int | None, int | None, str]:
        """The rank, or else the local rank, that the line names, and the rest of the line."""
        rank = local_rank = None
        while True:
            if (match := _TORCH_RANK.match(line)) is not None:
                rank = int(match["rank"])
            elif (match := _LOCAL_RANK.match(line)) is not None:
                local_rank = int(match["rank"])
            elif self.has_tasks and rank is None and (match := _TASK.match(line)) is not None:
                rank = int(match["rank"])
            else:
                return rank, local_rank, line
            line = line[match.end() :]
