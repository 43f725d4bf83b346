"""The numbers under which torch documents graph breaks."""

from __future__ import annotations

import re

from shardscope._torch.private import find_name

__all__ = ["find_break_id"]

_find_page = find_name(
    "torch._dynamo.exc.get_gbid_documentation_link",
    "print the graph break ids of torch's documentation",
)
_NUMBER = re.compile(r"gb(\d+)\.html")


def find_break_id(kind: str) -> str:
    """`GB0123`, or nothing if torch has no page on breaks of this kind."""
    found = _NUMBER.search(_find_page(kind) or "")
    return f"GB{found[1]}" if found else ""
