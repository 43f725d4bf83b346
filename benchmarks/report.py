"""How long a large recording takes to become a page, and how large the file is.

    PYTHONPATH=src python benchmarks/report.py

20,000 collectives, 5,000 modules, 64 ranks, with memory, coverage, an explanation and a diagnosis.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from large_recording import make_large
from shardscope.report.html import encode_page, render_page
from shardscope.report.page.build import build_page

MAX_BYTES = 5_000_000


def main() -> None:
    """Print three lines; fail if the file is larger than it may be."""
    recording = make_large()
    start = time.perf_counter()
    page = build_page(recording)
    built = time.perf_counter()
    document = render_page(page)
    rendered = time.perf_counter()
    size = len(document.encode())
    print(f"build the page   {built - start:6.2f} s")
    print(f"write the file   {rendered - built:6.2f} s")
    print(
        f"size of the file {size / 1e6:6.2f} MB, of it data {len(encode_page(page)) / 1e6:.2f} MB"
    )
    if size > MAX_BYTES:
        sys.exit(f"larger than {MAX_BYTES / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
