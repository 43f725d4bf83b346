"""The user's line behind a node of a program."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import PurePath

__all__ = ["user_line"]

_FRAME = re.compile(
    r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*\n(?P<code>[^\n]*)', re.M
)


@lru_cache(maxsize=4096)
def user_line(stack_trace: str) -> str:
    """`model.py:12: h = self.up(x)` of the innermost frame that is not torch's, or ""."""
    frames = list(_FRAME.finditer(stack_trace))
    own = [one for one in frames if not _is_torchs(one["file"])]
    if not (own or frames):
        return ""
    frame = (own or frames)[-1]
    code = frame["code"].strip()
    return f"{PurePath(frame['file']).name}:{frame['line']}{': ' if code else ''}{code}"


def _is_torchs(file: str) -> bool:
    return "/torch/" in file.replace("\\", "/") and "site-packages" in file
