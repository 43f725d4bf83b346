"""How long `shardscope serve` takes to show a run of 1,024 ranks and a million collectives.

    PYTHONPATH=src python benchmarks/serve.py

Writes the recording as Parquet (`tests/huge_run.py`), starts the command, opens its address in
Chromium and scrolls the table of all collectives. The first view counts from the start of the
command to the second frame that has the view. A frame of scrolling includes the rows that the
server sends; "blank" is the share of frames in which a row in sight had not arrived.
"""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import click
from playwright.sync_api import Browser, Page

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from huge_run import write_huge
from report import NEXT_FRAMES, NUM_FRAMES, STEPS, chromium

MAX_FIRST_VIEW_S = 3.0
NUM_STARTS = 5
SORTS = {"sort by bytes": "-wire", "sort by module": "owner"}
SCROLL = """async ([step, count]) => {
  const table = [...document.querySelectorAll(".table")].at(-1);
  const frames = [];
  let last = performance.now();
  let numBlank = 0;
  for (let turn = 0; turn < count; turn++) {
    table.scrollTop += step;
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    frames.push(now - last);
    last = now;
    numBlank += table.querySelector(".table-body").textContent.includes("………") ? 1 : 0;
  }
  return [frames, numBlank];
}"""
ARRIVED = """() => {
  const table = [...document.querySelectorAll(".table")].at(-1);
  const text = table.querySelector(".table-body").textContent;
  return text.length > 0 && !text.includes("………");
}"""


@contextmanager
def serve(path: Path) -> Iterator[str]:
    """Start the command; yields its address."""
    command = [sys.executable, "-m", "shardscope", "serve", str(path), "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        printed = re.search(r"http\S+", process.stdout.readline())
        assert printed is not None
        yield printed[0]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def read_cpu_s() -> float:
    """CPU seconds of commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def time_first_view(browser: Browser, path: Path) -> tuple[float, float, float]:
    """Seconds until the view is drawn and until the server listens, and the command's CPU time."""
    start, cpu_s = time.perf_counter(), read_cpu_s()
    with serve(path) as url:
        listening = time.perf_counter() - start
        page = browser.new_page(viewport={"width": 1280, "height": 860})
        page.goto(url)
        page.wait_for_selector("main h2, .facts")
        page.evaluate(NEXT_FRAMES)
        seconds = time.perf_counter() - start
        page.close()
    return seconds, listening, read_cpu_s() - cpu_s


def open_table(browser: Browser, url: str, params: str = "") -> Page:
    """Open the view of collectives, and wait for the rows of its table."""
    page = browser.new_page(viewport={"width": 1280, "height": 860})
    page.goto(url)
    page.goto(f"{page.url}#/communication{params}")
    page.locator(".table").last.scroll_into_view_if_needed()
    page.wait_for_function(ARRIVED)
    return page


def handle(browser: Browser, path: Path) -> None:
    """Scroll, jump and sort, and print how that goes."""
    with serve(path) as url:
        page = open_table(browser, url)
        for name, step in STEPS.items():
            frames, num_blank = page.evaluate(SCROLL, [step, NUM_FRAMES])
            frames.sort()
            late = frames[int(len(frames) * 0.95)]
            print(
                f"scroll, {name:23} {median(frames):.0f} ms, 95 % {late:.0f}, "
                f"worst {frames[-1]:.0f}, blank {num_blank / NUM_FRAMES:.0%}"
            )
        table = page.locator(".table").last
        start = time.perf_counter()
        table.evaluate("table => { table.scrollTop = table.scrollHeight / 2; }")
        page.evaluate(NEXT_FRAMES)
        page.wait_for_function(ARRIVED)
        print(f"jump to the middle {time.perf_counter() - start:.2f} s")
        for name, sort in SORTS.items():
            start = time.perf_counter()
            address = page.url.partition("#")[0]
            page.goto(f"{address}#/communication?sort.collectives={sort}")
            page.evaluate(NEXT_FRAMES)
            page.wait_for_function(ARRIVED)
            print(f"{name:18} {time.perf_counter() - start:.2f} s")


@click.command()
def main() -> None:
    """Print each figure; fail where the first view takes too long."""
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        path = Path(folder, "huge.parquet")
        start = time.perf_counter()
        write_huge(path)
        print(f"write the file   {time.perf_counter() - start:6.2f} s, ", end="")
        print(f"{path.stat().st_size / 1e6:.1f} MB")
        times = sorted(time_first_view(browser, path) for _ in range(NUM_STARTS))
        first, listening, cpu_s = times[len(times) // 2]
        print(f"first view {first:.2f} s ({times[0][0]:.2f} - {times[-1][0]:.2f}), ", end="")
        print(f"of it until the server listens {listening:.2f} s; CPU {cpu_s:.2f} s")
        handle(browser, path)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        print(f"most memory of a process {peak:,.0f} MB")
        if first > MAX_FIRST_VIEW_S:
            sys.exit(f"slower than {MAX_FIRST_VIEW_S:.0f} s")


if __name__ == "__main__":
    main()
