"""How long a large recording takes to become a page, how large the file is, and how it handles.

    PYTHONPATH=src python benchmarks/report.py            # with Chromium: opening and scrolling
    PYTHONPATH=src python benchmarks/report.py --no-browser

20,000 collectives, 5,000 modules, 64 ranks, with memory, coverage, an explanation and a diagnosis.
Opening counts from the call to the second frame that has the view; scrolling is the time of a frame
while the table of all collectives is moved, by a turn of a wheel or by a page a frame.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import click
from playwright.sync_api import Browser, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from large_recording import make_large
from shardscope.report.html.html import build_page, encode_page, render_page

MAX_BYTES = 5_000_000
MAX_OPENING_S = 2.0
VIEWS = ("overview", "modules", "communication", "sharding", "coverage", "compiler", "memory")
NUM_OPENINGS = 3
NUM_FRAMES = 240
STEPS = {"a wheel's turn a frame": 120, "a page a frame": 700}
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
NEXT_FRAMES = "() => new Promise(go => requestAnimationFrame(() => requestAnimationFrame(go)))"
SCROLL = """async ([step, count]) => {
  const table = [...document.querySelectorAll(".table")].at(-1);
  const frames = [];
  let last = performance.now();
  for (let turn = 0; turn < count; turn++) {
    table.scrollTop += step;
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    frames.push(now - last);
    last = now;
  }
  return frames;
}"""


def write_page() -> str:
    """Print how long it takes; the document."""
    recording = make_large()
    start = time.perf_counter()
    page = build_page(recording)
    built = time.perf_counter()
    document = render_page(page)
    rendered = time.perf_counter()
    size, data = len(document.encode()), len(encode_page(page))
    print(f"build the page   {built - start:6.2f} s")
    print(f"write the file   {rendered - built:6.2f} s")
    print(f"size of the file {size / 1e6:6.2f} MB, of it data {data / 1e6:.2f} MB")
    if size > MAX_BYTES:
        sys.exit(f"larger than {MAX_BYTES / 1e6:.0f} MB")
    return document


@contextmanager
def chromium() -> Iterator[Browser]:
    """Whichever is installed, without a GPU."""
    found = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=list(OPTIONS))
        yield browser
        browser.close()


def time_opening(browser: Browser, url: str) -> float:
    """Seconds until the view is drawn."""
    page = browser.new_page(viewport={"width": 1280, "height": 860})
    start = time.perf_counter()
    page.goto(url)
    page.wait_for_selector("main h2, .facts")
    page.evaluate(NEXT_FRAMES)
    seconds = time.perf_counter() - start
    page.close()
    return seconds


def time_scrolling(browser: Browser, url: str, step: int) -> list[float]:
    """Milliseconds of each frame, sorted."""
    page = browser.new_page(viewport={"width": 1280, "height": 860})
    page.goto(url)
    page.wait_for_selector(".table")
    page.locator(".table").last.scroll_into_view_if_needed()
    frames: list[float] = page.evaluate(SCROLL, [step, NUM_FRAMES])
    page.close()
    return sorted(frames)


def handle(document: str) -> None:
    """Open and scroll it, and print how that goes."""
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        file = Path(folder, "report.html")
        file.write_text(document, encoding="utf-8")
        slowest = 0.0
        for view in VIEWS:
            url = f"{file.as_uri()}#/{view}"
            times = [time_opening(browser, url) for _ in range(NUM_OPENINGS)]
            slowest = max(slowest, median(times))
            print(f"open {view:15} {median(times):.2f} s ({min(times):.2f} - {max(times):.2f})")
        for name, step in STEPS.items():
            frames = time_scrolling(browser, f"{file.as_uri()}#/communication", step)
            late, worst = frames[int(len(frames) * 0.95)], frames[-1]
            print(f"scroll, {name:23} {median(frames):.0f} ms, 95 % {late:.0f}, worst {worst:.0f}")
        if slowest > MAX_OPENING_S:
            sys.exit(f"slower than {MAX_OPENING_S:.0f} s")


@click.command()
@click.option("--browser/--no-browser", default=True, help="Open and scroll the page too.")
def main(browser: bool) -> None:
    """Print each figure; fail where a bar is missed."""
    document = write_page()
    if browser:
        handle(document)


if __name__ == "__main__":
    main()
