"""Files of the repository that are pages of the site too: README, benchmarks, changes.

They are not copied: links in every page work in the repository as they are, and are turned here
into those of the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PAGES = {
    "README.md": "tour.md",
    "benchmarks/README.md": "benchmarks.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_DIRECTIVE = re.compile(
    r"<!-- (?:not run|needs|figures vary|same as|killed at)\b.*?-->\n?", re.DOTALL
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """A folder's star in the menu stands for its pages that are not there by name."""
    named = set(re.findall(r"[\w/-]+\.md", str(config.nav)))
    for section in config.nav or []:
        for title, entries in section.items():
            if isinstance(entries, list):
                section[title] = [
                    page for entry in entries for page in _expand(entry, named, config)
                ]
    return config


def _expand(entry: Any, named: set[str], config: MkDocsConfig) -> list[Any]:
    if not isinstance(entry, str) or not entry.endswith("/*"):
        return [entry]
    pages = sorted((Path(config.docs_dir) / entry).parent.glob("*.md"))
    found = [page.relative_to(config.docs_dir).as_posix() for page in pages]
    return [page for page in found if page not in named]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages from outside of docs/."""
    for source, page in PAGES.items():
        path = posixpath.join(posixpath.dirname(config.config_file_path), source)
        files.append(File.generated(config, page, abs_src_path=path))
    return files


def on_page_markdown(markdown: str, *, page: Page, files: Files, **_: Any) -> str:
    """Turn links, and take out what only the tests of code blocks read."""
    place = _place_in_repository(page.file.src_uri)
    turned = _LINK.sub(lambda link: _turn(link, place, page.file.src_uri, files), markdown)
    return _DIRECTIVE.sub("", turned)


def _place_in_repository(uri: str) -> str:
    return next((source for source, name in PAGES.items() if name == uri), f"docs/{uri}")


def _turn(link: re.Match[str], place: str, uri: str, files: Files) -> str:
    text, target = link[1], link[2]
    path, hash_sign, anchor = target.partition("#")
    if not path or "://" in path:
        return link[0]
    meant = posixpath.normpath(posixpath.join(posixpath.dirname(place), path))
    name = PAGES.get(meant, meant.removeprefix("docs/"))
    if files.get_file_from_path(name) is not None:
        relative = posixpath.relpath(name, posixpath.dirname(uri) or ".")
        return f"[{text}]({relative}{hash_sign}{anchor})"
    if meant == "docs/decisions":
        return text
    return f"{text} (`{meant}`)"  # in the repository, and not on the site
