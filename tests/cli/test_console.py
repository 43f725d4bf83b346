"""Progress is for people who wait at a terminal; everybody else hears nothing."""

from __future__ import annotations

import sys
import time
from io import StringIO

import pytest
from rich.text import Text

from shardscope.cli import console
from shardscope.cli.console import print_out, show_progress


class _Screen(StringIO):
    """A terminal, for those who ask."""

    def isatty(self) -> bool:
        return True


def _wait_in(screen, monkeypatch, **options):
    """What a person sees of something that takes longer than their patience."""
    monkeypatch.setattr(console, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    with show_progress("judging", **options) as report:
        report("op \x1b[31m1")
        end = time.monotonic() + 30
        while screen.isatty() and "judging" not in screen.getvalue() and time.monotonic() < end:
            if not options.get("is_shown", True):
                break
            time.sleep(0.01)
    return screen.getvalue()


def test_progress_is_shown_on_a_terminal(monkeypatch):
    seen = _wait_in(_Screen(), monkeypatch)
    assert "judging: op \\x1b[31m1" in seen
    assert "\x1b[31m1" not in seen


def test_progress_is_not_shown_elsewhere(monkeypatch):
    assert _wait_in(StringIO(), monkeypatch) == ""
    assert _wait_in(_Screen(), monkeypatch, is_shown=False) == ""


@pytest.mark.parametrize("things", [(), (Text("one"),), (Text("one\ntwo"), "three")])
def test_text_is_printed_unchanged(capsys, things):
    print_out(*things)
    printed = capsys.readouterr()
    expected = "".join(f"{thing}\n" for thing in things)
    assert (printed.out, printed.err) == (expected, "")
