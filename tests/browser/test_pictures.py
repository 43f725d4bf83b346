"""The picture of the README is of the current report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from examples_script import SCRIPT

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def test_the_screenshot_shows_the_text_of_the_current_report(
    browser: Browser, tmp_path: Path
) -> None:
    """Not its colours and sizes: `make pictures` is run by hand when the page looks different."""
    page = SCRIPT.open_report(browser, SCRIPT.SHOWN, tmp_path)
    text = page.inner_text("body")
    page.close()
    assert SCRIPT.read_text(SCRIPT.SCREENSHOT.read_bytes()) == text, "run make pictures"
