"""The numbers under which torch documents graph breaks."""

from __future__ import annotations

import re

from torch._dynamo.exc import get_gbid_documentation_link

__all__ = ["find_break_id"]

_NUMBER = re.compile(r"gb(\d+)\.html")


def find_break_id(kind: str) -> str:
    """`GB0123`, or nothing if torch has no page on breaks of this kind."""
    found = _NUMBER.search(get_gbid_documentation_link(kind) or "")
    return f"GB{found[1]}" if found else ""
