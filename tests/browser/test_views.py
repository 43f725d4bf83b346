"""Every view of a large page and of a hostile one, in a real browser."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from sample_recordings import make_collective, make_recording
from shardscope.record import Call
from shardscope.report.html.html import build_page

if TYPE_CHECKING:
    from playwright.sync_api import Page

expect = pytest.importorskip("playwright.sync_api").expect

VIEWS = {
    "overview": "Findings",
    "modules": "Modules by phase",
    "communication": "All collectives",
    "sharding": "Parameters",
    "coverage": "Ops by verdict",
    "compiler": "Graphs",
    "memory": "Memory over the step",
}
# Parts of attacks as they are to be read, once in each view.
INERT = ("<script>window.attacked = 1</script>", "]]><img src=x onerror='window.attacked = 1'>")
LAST_ROW = "[role=grid][aria-label=collectives] .table-body > :last-child"


def go_to(page: Page, view: str) -> None:
    page.goto(re.sub(r"#/\w+", f"#/{view}", page.url))
    expect(page.locator(f".view-{view}")).to_be_visible()


def test_every_view_of_a_large_page_has_data_and_fits(open_page, large) -> None:
    page = open_page(large, "#/overview", width=400)
    for view, title in VIEWS.items():
        go_to(page, view)
        expect(page.get_by_role("heading", name=re.compile(title)).first).to_be_visible()
        assert page.locator(".empty, .failure").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 400


_ROWS_OF_TILES = """() => {
    const frame = document.querySelector(".facts").getBoundingClientRect();
    const rows = new Map();
    for (const tile of document.querySelectorAll(".fact")) {
        const { top, left, right } = tile.getBoundingClientRect();
        const row = rows.get(top) ?? [0, Infinity, -Infinity];
        rows.set(top, [row[0] + 1, Math.min(row[1], left), Math.max(row[2], right)]);
    }
    return [...rows.values()].map(
        ([count, left, right]) => [count, left - frame.left <= 2 && frame.right - right <= 2]
    );
}"""


def test_tiles_fill_their_rows_evenly(open_page, large) -> None:
    assert len(large.facts) == 8
    page = open_page(large, "#/overview")
    assert page.evaluate(_ROWS_OF_TILES) == [[4, True], [4, True]]
    page.set_viewport_size({"width": 400, "height": 900})
    expect(page.locator(".fact").first).to_have_css("flex-basis", "33.3333%")
    assert page.evaluate(_ROWS_OF_TILES) == [[3, True], [3, True], [2, True]]


def test_a_tiny_share_has_a_bar_of_that_length(open_page, large) -> None:
    page = open_page(large, "#/sharding")
    line = page.locator(".rank-bytes-line", has_text="replicated")
    expect(line).to_contain_text("<1% of that")
    widths = [part.bounding_box()["width"] for part in line.locator(".rank-bytes-part").all()]
    assert sum(widths) < 0.02 * line.bounding_box()["width"]


_SHARES_OF_BARS = """frame => [...frame.querySelectorAll(".bar")].map(bar => {
    const fill = bar.querySelector(".bar-fill");
    const width = one => one.getBoundingClientRect().width;
    return fill ? width(fill) / width(fill.parentElement) : 0;
})"""


def test_bars_are_as_long_as_their_figures(open_page) -> None:
    sizes = [4000, 1000, 10, 1]
    calls = tuple(
        make_collective(order=at, wire_bytes=size, cause=Call(api=f"call {at}"))
        for at, size in enumerate(sizes)
    )
    page = open_page(build_page(make_recording(calls)), "#/communication")
    causes = page.get_by_role("region", name="Causes")
    expect(causes.locator(".bar")).to_have_count(4)
    shares = causes.evaluate(_SHARES_OF_BARS)
    assert shares == pytest.approx([size / sizes[0] for size in sizes], abs=2e-3)


def test_every_shape_of_recording_opens_in_every_view(open_page, any_recording) -> None:
    page = open_page(build_page(any_recording), "#/overview")
    for view in (*VIEWS, "proof", "compare"):
        go_to(page, view)
        expect(page.locator(f".view-{view} > *").first).to_be_visible()
        assert page.locator(".failure[role=alert]").count() == 0


def test_hostile_text_is_displayed_and_never_executed(open_page, hostile) -> None:
    page = open_page(hostile, "#/overview", width=400)
    for view in (*VIEWS, "proof"):
        go_to(page, view)
        shown = page.locator(f".view-{view}")
        assert any(attack in shown.inner_text() for attack in INERT), view
        assert page.locator(".failure[role=alert], #view script, img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.evaluate("window.attacked") is None


def test_twenty_thousand_rows_scroll_to_the_last(open_page, large) -> None:
    page = open_page(large, "#/communication")
    calls = page.get_by_role("grid", name="collectives")
    expect(calls).to_have_attribute("aria-rowcount", "20001")
    calls.evaluate("grid => { grid.scrollTop = grid.scrollHeight; }")
    last = page.locator(LAST_ROW)
    expect(last).to_have_attribute("aria-rowindex", "20001")
    said = large.communication
    expect(last).to_contain_text(said.kinds[said.calls.kind[-1]])
    expect(last).to_contain_text(str(said.calls.order[-1]))
    assert calls.locator(".table-body > *").count() < 80
    calls.focus()
    page.keyboard.press("Home")
    expect(calls.locator("[aria-selected=true]")).to_have_attribute("aria-rowindex", "2")
    page.keyboard.press("End")
    expect(calls.locator("[aria-selected=true]")).to_have_attribute("aria-rowindex", "20001")


def test_a_search_narrows_tables_of_twenty_thousand_rows(open_page, large) -> None:
    page = open_page(large, "#/communication")
    page.get_by_role("searchbox").fill("layers.17.attention reduce_scatter")
    said = large.communication
    paths = large.modules.path
    num_rows = sum(
        said.kinds[kind] == "reduce_scatter" and "layers.17.attention" in paths[owner]
        for kind, owner in zip(said.calls.kind, said.calls.owner, strict=True)
    )
    assert num_rows > 0
    shown = page.get_by_role("region", name="All collectives").locator(".table-foot")
    expect(shown).to_have_text(f"{num_rows} of 20,000 rows")
