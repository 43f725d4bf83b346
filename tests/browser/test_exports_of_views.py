"""Files that the page saves: tables as CSV, charts as PNG and SVG, views as Markdown."""

from __future__ import annotations

import csv
import re
import struct
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from shardscope.record import Recording
from shardscope.record.units import format_bytes
from shardscope.report.export.csv import render_table
from shardscope.report.html.html import build_page
from small_recordings import make_memory_recording

if TYPE_CHECKING:
    from playwright.sync_api import Page

expect = pytest.importorskip("playwright.sync_api").expect


@pytest.fixture(scope="module")
def recording() -> Recording:
    return make_memory_recording()


def _save(page: Page, button: str) -> Path:
    page.get_by_role("button", name="Export").click()
    with page.expect_download() as download:
        page.get_by_role("button", name=button).click()
    saved = Path(str(download.value.path()))
    return saved.rename(saved.parent / download.value.suggested_filename)


def test_tables_charts_and_views_are_saved_offline(open_page, recording) -> None:
    page = open_page(build_page(recording), "#/memory")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    profile = recording.memory[0]

    saved = _save(page, "allocations in use as CSV")
    assert saved.name == "page0.allocations-in-use.csv"
    rows = list(csv.DictReader(StringIO(saved.read_text())))
    shown = {row["Module"]: int(row["Bytes"]) for row in rows}
    # The same figures as in Python's table of the peak, in which the root's name is empty, too.
    table = b"".join(render_table(recording, name="memory")).decode()
    expected: dict[str, int] = {}
    for use in csv.DictReader(StringIO(table)):
        expected[use["module"]] = expected.get(use["module"], 0) + int(use["num_bytes"])
    shown[""] = shown.pop("no module") + shown.pop("Sequential")
    assert shown == expected

    saved = _save(page, "memory over the step as SVG")
    document = ElementTree.parse(saved).getroot()
    texts = [element.text for element in document.iter("{http://www.w3.org/2000/svg}text")]
    assert "forward" in texts
    assert any("peak" in "".join(element.itertext()) for element in document.iter())
    assert "var(" not in saved.read_text()  # colours are resolved
    assert len(list(document.iter("{http://www.w3.org/2000/svg}path"))) >= 3

    saved = _save(page, "memory over the step as PNG")
    assert saved.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", saved.read_bytes()[16:24])
    assert width > 2000
    assert height > 600

    page.get_by_role("button", name="Export").click()
    page.get_by_role("button", name="Copy", exact=True).click()
    expect(page.get_by_text("Copied.")).to_be_visible()
    copied = page.evaluate("navigator.clipboard.readText()")
    page.keyboard.press("Escape")
    saved = _save(page, "Save")
    assert saved.name == "page0.memory.md"
    assert saved.read_text() == copied
    assert "## In use at the peak" in copied
    assert format_bytes(profile.peak_bytes) in copied
    assert "| Module | Bytes | Share | Count |" in copied
    assert re.search(r"^- activations +\S", copied, re.M)
    assert "Click an instant" in copied


@pytest.mark.parametrize("view", ["modules", "communication", "sharding"])
def test_charts_of_boxes_and_canvases_are_saved_as_they_are_drawn(open_page, large, view) -> None:
    page = open_page(large, f"#/{view}")
    page.get_by_role("button", name="Export").click()
    buttons = page.get_by_role("button", name=re.compile("as SVG$"))
    if view == "sharding":
        page.keyboard.press("Escape")
        page.get_by_role("grid").get_by_role("row").nth(1).click()
        page.get_by_role("button", name="Export").click()
    expect(buttons.first).to_be_visible()
    for name in [button.get_attribute("aria-label") for button in buttons.all()]:
        if not page.get_by_role("button", name=name).first.is_visible():
            page.get_by_role("button", name="Export").click()
        with page.expect_download() as download:
            page.get_by_role("button", name=name).first.click()
        document = ElementTree.parse(str(download.value.path())).getroot()
        assert len(list(document.iter())) > 8, name
