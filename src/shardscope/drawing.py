"""Renders a recording as HTML for `recording.html()`, without record/ importing the renderers.

The package record/ is shared by all others and must not import report/: reading a file would load
it too. So it imports only this module, which imports the renderer by name when it is called.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = "shardscope.report.html.html"


def draw_page(recording: Any) -> str:
    """A recording as an HTML document."""
    return str(import_module(_HOME).render_html(recording))


def draw_inline(recording: Any) -> str:
    """A recording as HTML inside a notebook."""
    return str(import_module(_HOME).render_inline(recording))
