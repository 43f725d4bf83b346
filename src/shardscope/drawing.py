"""Renders results as HTML for their methods, without record/ importing the renderers.

The package record/ is shared by all others and must not import report/: reading a file would load
it too. So it imports only this module, which imports the renderer by name when it is called.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PAGE = "shardscope.report.html.html"
_INLINE = "shardscope.report.html.inline"


def draw_page(recording: Any) -> str:
    """A recording as an HTML document."""
    return str(import_module(_PAGE).render_html(recording))


def draw_inline(result: Any) -> str:
    """A recording, a comparison or a layout as HTML inside a notebook."""
    return str(import_module(_INLINE).render_inline(result))
