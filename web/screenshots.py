"""Pictures of a page in every view, width and theme: screenshots.py REPORT OUT [VIEW …]."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

_WIDTHS = {400: 860, 1280: 860, 1920: 1080}
_VIEWS = ["overview", "modules", "communication", "sharding", "coverage"]
_VIEWS += ["compiler", "memory", "proof", "compare"]


def take(report: Path, folder: Path, views: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium-headless-shell") or shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu"],
        )
        for width, height in _WIDTHS.items():
            page = browser.new_page(viewport={"width": width, "height": height})
            for view in views:
                for theme in ("light", "dark"):
                    # A view may come with its parameters: `modules?m=layers.0`.
                    mark = "&" if "?" in view else "?"
                    page.goto(f"{report.resolve().as_uri()}#/{view}{mark}theme={theme}")
                    page.reload()
                    page.wait_for_timeout(300)
                    name = "".join(letter if letter.isalnum() else "-" for letter in view)
                    picture = folder / f"{name}-{width}-{theme}.png"
                    page.screenshot(path=picture, full_page=True)
        browser.close()


if __name__ == "__main__":
    take(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] or _VIEWS)
