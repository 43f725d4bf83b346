"""One Chromium for all tests of a page; each test has a tab that may neither fail nor fetch."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from large_recording import make_hostile, make_large
from shardscope.record import Recording
from shardscope.report.html.html import build_page, render_page
from shardscope.report.html.page import Page as PageRecord

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# The first has no window to draw, and needs half of the time.
_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

Open = Callable[..., Any]


@pytest.fixture(scope="session")
def started_browser() -> Iterator[tuple[Browser, asyncio.AbstractEventLoop]]:
    """Debian's Chromium, without an event loop that runs: that of Playwright is set by `browser`.

    Without Chromium these tests fail, since nothing else proves the page.
    """
    sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.fail(
            "these tests need Chromium, and none is here: apt-get install chromium-headless-shell"
        )
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=list(_OPTIONS))
        loop = asyncio.get_running_loop()
        asyncio._set_running_loop(None)
        yield started, loop
        asyncio._set_running_loop(loop)
        started.close()


@pytest.fixture
def browser(started_browser: tuple[Browser, asyncio.AbstractEventLoop]) -> Iterator[Browser]:
    """The browser of all tests. In other tests no event loop runs, so that they can start one."""
    started, loop = started_browser
    asyncio._set_running_loop(loop)
    yield started
    asyncio._set_running_loop(None)


_rendered: dict[int, str] = {}  # pages that several tests open, by the id of their record


@pytest.fixture(scope="session")
def large() -> PageRecord:
    """20,000 collectives, 5,000 modules, 64 ranks, and something in nearly every view."""
    return _render_once(make_large())


@pytest.fixture(scope="session")
def hostile() -> PageRecord:
    """Something in every view, and an attack in every text."""
    return _render_once(make_hostile())


def _render_once(recording: Recording) -> PageRecord:
    page = build_page(recording)
    _rendered[id(page)] = render_page(page)
    return page


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """`open_page(record, route, width=…, scheme=…)`; afterwards nothing may have gone wrong."""
    wrong: list[str] = []
    contexts = []

    def open_one(
        record: PageRecord, route: str = "", *, width: int = 1280, scheme: str = "light"
    ) -> Page:
        file = tmp_path / f"page{len(contexts)}.html"
        file.write_text(_rendered.get(id(record)) or render_page(record), encoding="utf-8")
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,  # type: ignore[arg-type]
            reduced_motion="reduce",
        )
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(5000)
        tab.on("console", lambda said: wrong.append(f"{said.type}: {said.text}"))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        local = ("file:", "data:", "blob:")
        tab.on("request", lambda asked: asked.url.startswith(local) or wrong.append(asked.url))
        tab.goto(f"{file.as_uri()}{route}")
        return tab

    yield open_one
    for context in contexts:
        context.close()
    assert not wrong
