"""Refuses a site that would load anything from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import BuildError

# What a browser fetches by itself, unlike links.
_FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|<link\b(?![^>]*\brel=["']?canonical)[^>]*\bhref=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|@import\s+["'(](?:https?:)?//[^"')]+|url\(["']?(?:https?:)?//[^"')]+"""
)


def on_post_build(config: MkDocsConfig) -> None:
    """Look through every page and style sheet."""
    site = Path(config.site_dir)
    for path in sorted(site.rglob("*")):
        if path.suffix in (".html", ".css"):
            found = _FETCHED.search(path.read_text())
            if found:
                raise BuildError(f"{path.relative_to(site)} loads from elsewhere: {found[0]}")
