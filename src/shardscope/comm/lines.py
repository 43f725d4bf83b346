"""The user's line behind a node of a program."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path, PurePath

from shardscope.comm.stack import shown_path
from shardscope.record import Source, replace_surrogates

__all__ = ["user_line", "user_source"]

_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_FRAME = re.compile(
    r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]*)\n(?P<code>[^\n]*)',
    re.M,
)


@lru_cache(maxsize=4096)
def user_line(stack_trace: str) -> str:
    """`model.py:12: h = self.up(x)` of the innermost frame that is not torch's or ours, or ""."""
    frame = _find_frame(stack_trace)
    if frame is None:
        return ""
    code = frame["code"].strip()
    return f"{PurePath(frame['file']).name}:{frame['line']}{': ' if code else ''}{code}"


@lru_cache(maxsize=4096)
def user_source(stack_trace: str) -> Source | None:
    """The same line as a record."""
    frame = _find_frame(stack_trace)
    if frame is None:
        return None
    return Source(
        file=replace_surrogates(shown_path(frame["file"])),
        line=int(frame["line"]),
        function=frame["function"].strip(),
        text=replace_surrogates(frame["code"].strip()[:200]),
    )


def _find_frame(stack_trace: str) -> re.Match[str] | None:
    frames = list(_FRAME.finditer(stack_trace))
    own = [one for one in frames if not _is_foreign(one["file"])]
    return (own or frames)[-1] if frames else None


def _is_foreign(file: str) -> bool:
    """Whether the line is torch's or ours, which call the user's."""
    is_torchs = "/torch/" in file.replace("\\", "/") and "site-packages" in file
    return is_torchs or file.startswith(_OURS)
