"""The door from a recording to what draws it.

People ask a recording for its page (`recording.html()`), but records may not know the rooms that
draw them: whoever only reads files would load those too, and a change there could reach the records
that all rooms share. So records know this file alone, and this file knows one name, which is
imported when somebody asks.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["draw_inline", "draw_page"]

_HOME = "shardscope.report.html"


def draw_page(recording: Any) -> str:
    """A document of its own."""
    return str(import_module(_HOME).render_html(recording))


def draw_inline(recording: Any) -> str:
    """The same, within a notebook."""
    return str(import_module(_HOME).render_inline(recording))
