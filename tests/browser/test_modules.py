"""The picture of the modules in a real browser: zoom, keys, colours, filters, comparison."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

import sample_recordings as samples
from sample_pages import make_page
from shardscope.report.html.html import build_page

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

expect = pytest.importorskip("playwright.sync_api").expect


def picture_of(page: Page) -> Locator:
    return page.get_by_role("tree", name=re.compile("modules by"))


def canvas_of(page: Page) -> str:
    return page.locator(".icicle canvas").evaluate("canvas => canvas.toDataURL()")


def press(page: Page, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def test_the_icicle_zooms_by_keys_and_clicks_and_the_address_follows(open_page) -> None:
    page = open_page(make_page(), "#/modules")
    picture = picture_of(page)
    active = picture.get_by_role("treeitem")
    picture.focus()
    press(page, "ArrowDown")
    expect(active).to_have_text("Llama: 21.4 GiB, 100% of the total")
    press(page, "ArrowDown", "ArrowDown")
    # Identical layers are one box with the sum of them all.
    expect(active).to_have_text(re.compile(r"^layers\.\{0…31\}: 20\.4 GiB, 96% of the total"))
    tip = page.get_by_role("tooltip")
    expect(tip).to_contain_text("20.4 GiB in all 32, 654 MiB each")
    expect(tip).to_contain_text("of its parent")
    full = canvas_of(page)
    press(page, "ArrowDown", "Enter")
    expect(page).to_have_url(re.compile(r"m=layers\.%5B0-31%5D\.(attention|feed_forward)$"))
    trail = page.get_by_role("navigation", name="zoomed module")
    expect(trail).to_contain_text("0 … 31")
    expect(trail).to_contain_text("7.00 GiB, 33% of the total, 224 MiB each")
    assert canvas_of(page) != full
    picture.focus()
    press(page, "Backspace")
    expect(page).to_have_url(re.compile(r"m=layers\.%5B0-31%5D$"))
    page.go_back()
    expect(page).to_have_url(re.compile(r"m=layers\.%5B0-31%5D\.\w+$"))
    trail.get_by_role("button", name="layers", exact=True).click()
    expect(page).to_have_url(re.compile(r"m=layers$"))
    page.keyboard.press("Escape")
    expect(trail).to_have_count(0)
    assert canvas_of(page) == full
    box = picture.bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 40)
    expect(page).to_have_url(re.compile(r"m=layers$"))
    page.get_by_role("button", name="Parameters").click()
    expect(page).to_have_url(re.compile("by=parameters"))
    picture.focus()
    press(page, "Home")
    expect(active).to_have_text("Llama: 8,030,261,248, 100% of the total")


def test_colours_filter_the_picture_and_a_search_says_its_share(open_page) -> None:
    page = open_page(build_page(samples.make_llama(num_layers=4)), "#/modules")
    picture = picture_of(page)
    by_axis = page.get_by_role("group", name="colours: axis")
    expect(by_axis.get_by_role("button")).to_have_count(2)
    full = canvas_of(page)
    by_axis.get_by_role("button", name=re.compile("^tp")).click()
    expect(page).to_have_url(re.compile("axis=tp"))
    assert canvas_of(page) != full
    by_axis.get_by_role("button", name=re.compile("^tp")).click()
    assert canvas_of(page) == full
    page.get_by_role("button", name="Kind", exact=True).click()
    kinds = page.get_by_role("group", name="colours: kind").get_by_role("button")
    expect(kinds.first).to_have_text(re.compile("all_gather|all_reduce|reduce_scatter"))
    page.get_by_role("searchbox").fill("attention")
    expect(page.locator(".icicle-matches")).to_have_text(
        re.compile(r"^\d+ modules match the search: .*% of the total\.$")
    )
    page.get_by_role("searchbox").fill("")
    page.get_by_role("button", name="Collectives", exact=True).click()
    picture.focus()
    press(page, "ArrowDown")
    expect(picture.get_by_role("treeitem")).to_have_text(
        re.compile(r"^Llama: \d+, 96% of the total")
    )


def test_a_comparison_is_coloured_by_change_and_shows_what_is_gone(open_page) -> None:
    before, after = samples.make_llama(num_layers=4), samples.make_llama(num_layers=2)
    run = replace(after.run, command="shorter")
    page = open_page(build_page(replace(after, run=run), against=before), "#/modules")
    picture = picture_of(page)
    expect(page.get_by_role("button", name="Change")).to_have_attribute("aria-pressed", "true")
    picture.focus()
    press(page, "ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight")
    expect(picture.get_by_role("treeitem")).to_have_text(re.compile(r"^layers\.\{2,3\}: gone, was"))
    expect(page.get_by_role("columnheader", name="change")).to_be_visible()
    row = page.get_by_role("treegrid").get_by_role("row", name=re.compile("layers ModuleList"))
    expect(row.first).to_contain_text("(−50%)")
