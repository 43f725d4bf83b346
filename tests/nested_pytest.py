"""pytest run by a test, in the same process.

pytest's own `pytester` would forget every module that is imported meanwhile, torch's among them,
which cannot be imported twice.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import redirect_stdout
from importlib.metadata import entry_points
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest

# Installed, pytest finds the plugin by itself, and may not be told of it twice.
_IS_INSTALLED = any(one.name == "shardscope" for one in entry_points(group="pytest11"))
_LOADED = () if _IS_INSTALLED else ("-p", "shardscope.plugins.pytest")
_ALONE = ("-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:xdist")


class Run(NamedTuple):
    """How many tests passed, failed or did not begin (`error`), and what was printed."""

    outcomes: dict[str, int]
    printed: str


def run_pytest(folder: Path, *args: str) -> Run:
    """Run the tests in a folder, whose modules can be imported, and are forgotten afterwards."""
    before = set(sys.modules)
    counter, printed = _Counter(), StringIO()
    # Tests of ours have imported the plugin already, which pytest would remark on.
    quiet = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
    named = ("--rootdir", str(folder), *(args or (str(folder),)), *quiet)
    sys.path.insert(0, str(folder))
    try:
        with redirect_stdout(printed):
            pytest.main([*_ALONE, *_LOADED, "--import-mode=importlib", *named], plugins=[counter])
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(str(folder)):
                del sys.modules[name]
    return Run(dict(counter.outcomes), printed.getvalue())


class _Counter:
    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.outcomes[report.outcome] += 1
        elif report.failed:
            self.outcomes["error"] += 1
