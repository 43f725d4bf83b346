"""Renders results inside a notebook: a recording as its page, other results as coloured text."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.segment import Segment
from rich.style import Style

from shardscope.record import Recording, TensorLayout
from shardscope.report.compare.changes import Changes
from shardscope.report.compare.changes_text import render_changes
from shardscope.report.html.html import render_html
from shardscope.report.text.shard_drawings import render_layout
from shardscope.report.text.summary import render_summary

_HEIGHT = "720px"
_MAX_BYTES = 2_000_000  # of a page: a notebook stores each output, and some editors refuse more
_MAX_LINES = 400
_WIDTH = 118
_STYLE = (  # notebooks give other fonts to text of ours
    "font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 12px; line-height: 1.35; "
    "white-space: pre; overflow-x: auto; color: inherit; background: none; text-align: left"
)
_TOO_LARGE = (
    "The page of this recording is too large for a notebook. Write it to a file and open that: "
    "Path('report.html').write_text(recording.html(), encoding='utf-8')"
)
# Legible on white and on black, because a notebook does not say which it has.
_COLOURS = {
    "red": "#d9363e",
    "green": "#2f9e44",
    "yellow": "#b7791f",
    "cyan": "#0d8a9a",
    "blue": "#3b82f6",
    "magenta": "#b24cc2",
}


def render_inline(result: Recording | Changes | TensorLayout) -> str:
    """Render a result as HTML to be put into another document, such as a notebook."""
    if isinstance(result, Changes):
        return _render_text(render_changes(result))
    if isinstance(result, TensorLayout):
        return _render_text(Group(*render_layout(result)))
    document = render_html(result)
    if len(document) > _MAX_BYTES:
        return f"<p>{escape(_TOO_LARGE)}</p>" + _render_text(render_summary(result))
    return (
        '<iframe title="shardscope report" sandbox="allow-scripts allow-downloads" '
        f'style="width: 100%; height: {_HEIGHT}; border: 0" srcdoc="{escape(document)}"></iframe>'
    )


def _render_text(renderable: RenderableType) -> str:
    """Render what a terminal would show, as preformatted text with its colours."""
    console = Console(
        file=StringIO(), width=_WIDTH, color_system="standard", legacy_windows=False, emoji=False
    )
    lines = console.render_lines(renderable, pad=False)
    shown = ["".join(_render_segments(line)) for line in lines[:_MAX_LINES]]
    if len(lines) > _MAX_LINES:
        shown.append(f"… {len(lines) - _MAX_LINES:,} more lines")
    return f'<pre class="shardscope" style="{_STYLE}">{chr(10).join(shown)}</pre>'


def _render_segments(line: list[Segment]) -> Iterator[str]:
    for text, style, _ in line:
        safe = escape(text)
        css = "; ".join(_list_css(style)) if style is not None and text.strip() else ""
        yield f'<span style="{css}">{safe}</span>' if css else safe


def _list_css(style: Style) -> Iterator[str]:
    colour = None if style.color is None else _COLOURS.get(style.color.name)
    if colour is not None:
        yield f"color: {colour}"
    if style.bold:
        yield "font-weight: 600"
    if style.dim:
        yield "opacity: 0.7"
    if style.italic:
        yield "font-style: italic"
