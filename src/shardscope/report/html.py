"""A recording as one HTML file: it opens offline, asks for nothing, and runs no code but ours.

The page's records travel as JSON that no HTML parser can mistake for markup; a browser runs the one
script whose hash the document names. Drawing is the bundle's.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape
from importlib.resources import files

from shardscope.record import Recording
from shardscope.record.encoding import encode_json
from shardscope.report.page.build import build_page
from shardscope.report.page.records import Page

__all__ = ["encode_page", "render_html", "render_inline", "render_page"]

# What could end a script element, begin a comment in one, or break a line of JavaScript.
_ESCAPES = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\u2028": "\\u2028",
    "\u2029": "\\u2029",
}
_TABLE = str.maketrans(_ESCAPES)

_DOCUMENT = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="shardscope">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<noscript>{apology}</noscript>
<div id="app"></div>
<script type="application/json" id="page">{data}</script>
<script>{script}</script>
</body>
</html>
"""
_INLINE_HEIGHT = "720px"
_APOLOGY = (
    "This report needs JavaScript. Allow scripts for this file, or run `shardscope show` for "
    "the same figures in a terminal."
)


def render_html(
    recording: Recording,
    *,
    against: Recording | None = None,
    titles: tuple[str, str] = ("before", "after"),
) -> str:
    """The document; the same recording gives the same text. `titles` are of a comparison's two."""
    return render_page(build_page(recording, against=against, titles=titles))


def render_inline(recording: Recording) -> str:
    """The document within another one, such as a notebook, which it cannot reach from there."""
    document = escape(render_html(recording))
    return (
        f'<iframe title="shardscope report" sandbox="allow-scripts" '
        f'style="width: 100%; height: {_INLINE_HEIGHT}; border: 0" srcdoc="{document}"></iframe>'
    )


def render_page(page: Page) -> str:
    """The document of a page that was built already."""
    bundle = files("shardscope.report") / "bundle"
    script = _check_inline((bundle / "app.js").read_text(encoding="utf-8"), "</script", "<!--")
    style = _check_inline((bundle / "app.css").read_text(encoding="utf-8"), "</style")
    return _DOCUMENT.format(
        policy=_make_policy(script),
        title=escape(page.run.title),
        style=style,
        apology=escape(_APOLOGY),
        data=encode_page(page),
        script=script,
    )


def encode_page(page: Page) -> str:
    """The page as JSON that is inert within HTML."""
    return encode_json(page).decode("utf-8").translate(_TABLE)


def _check_inline(text: str, *ends: str) -> str:
    for end in ends:
        assert end not in text.lower(), f"the bundle holds {end}, which would end its element"
    return text


def _make_policy(script: str) -> str:
    """Nothing is fetched, and a script that somebody smuggled in has another hash than ours."""
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
