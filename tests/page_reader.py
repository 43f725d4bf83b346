"""What an HTML report carries: its elements, and the page in it."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import final

import msgspec

from shardscope.report.html.page import Page

__all__ = ["Document", "read_page"]


@final
class Document(HTMLParser):
    """All elements with their attributes and texts, as a browser would find them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []  # with the element they are in
        self._open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self._open[-1], data))

    def tags(self) -> list[str]:
        """The names of all elements, in order."""
        return [tag for tag, _ in self.elements]

    def texts_of(self, tag: str) -> list[str]:
        """The texts of all elements of one name."""
        return [text for inside, text in self.texts if inside == tag]


def read_page(html: str) -> Page:
    """The page that a report carries; every field has to be of the type that its record says."""
    data, _ = Document(html).texts_of("script")
    return msgspec.json.decode(data, type=Page)
