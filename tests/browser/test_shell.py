"""The page's frame, its overview and its modules, in a real browser."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from sample_pages import lay_out, make_communication, make_page
from shardscope.report.html.page import Fact, FindingItem
from shardscope.report.html.page import Page as PageRecord

if TYPE_CHECKING:
    from playwright.sync_api import Page

expect = pytest.importorskip("playwright.sync_api").expect

VIEWS = ("Overview", "Modules", "Communication", "Sharding", "Coverage", "Compiler", "Memory")
HOSTILE = "</script><script>alert(1)</script>\"'&<img src=x onerror=alert(2)>\u202e🦙" + "x" * 300


def row_of(page: Page, name: str) -> str:
    """The text of a module's row."""
    return page.get_by_role("treegrid").get_by_role("row", name=re.compile(name)).first.inner_text()


def test_the_overview_shows_the_run_the_findings_and_the_gaps(open_page) -> None:
    page = open_page(make_page())
    expect(page).to_have_title("Llama 8B")
    expect(page.get_by_role("img", name="mesh: dp=128 × tp=8")).to_be_visible()
    findings = page.get_by_role("region", name=re.compile("Findings"))
    rules = findings.locator(".finding-rule").all_inner_texts()
    assert rules == ["implicit-redistribute", "replicated-parameter", "uneven-shards"]
    expect(findings).to_contain_text("return self.wo(output.view(batch, length, -1))")
    findings.get_by_role("button", name="1 warning").click()
    assert findings.locator(".finding-rule").all_inner_texts() == ["replicated-parameter"]
    gaps = page.get_by_role("region", name=re.compile("Gaps"))
    expect(gaps).to_contain_text("records lost")
    page.get_by_role("link", name=re.compile("Peak memory")).click()
    expect(page.get_by_role("tab", name="Memory")).to_have_attribute("aria-selected", "true")


def test_modules_can_be_folded_unfolded_and_closed(open_page) -> None:
    page = open_page(make_page(), "#/modules")
    tree = page.get_by_role("treegrid")
    expect(tree).to_have_attribute("aria-rowcount", "18")
    assert row_of(page, "0 … 31").split("\n")[:2] == ["0 … 31", "×32"]
    assert "20.4 GiB" in row_of(page, "0 … 31")  # 32 layers of 654 MiB
    tree.get_by_role("button", name="×32").click()
    expect(tree).to_have_attribute("aria-rowcount", str(18 + 31 * 12))
    tree.get_by_role("button", name="×32").click()
    page.get_by_role("button", name="close all").click()
    expect(tree).to_have_attribute("aria-rowcount", "6")
    page.get_by_role("button", name="open all").click()
    page.get_by_role("button", name="Counts").click()
    expect(page.get_by_role("columnheader", name="Collectives", exact=True)).to_be_visible()
    assert "show=counts" in page.url


def test_a_module_that_is_selected_is_selected_in_every_view(open_page) -> None:
    page = open_page(make_page())
    page.get_by_role("link", name="layers.{0…31}.attention.wo").click()
    chip = page.get_by_title("layers.0.attention.wo: show it in the tree")
    for name in VIEWS:
        page.get_by_role("tab", name=name).click()
        expect(chip).to_be_visible()
    page.get_by_role("tab", name="Overview").click()
    expect(page.locator(".finding-rule")).to_have_text(["implicit-redistribute"])
    chip.click()
    selected = page.get_by_role("treegrid").locator("[role=row][aria-selected=true]")
    expect(selected).to_contain_text("wo")
    page.keyboard.press("Escape")
    expect(chip).to_have_count(0)
    page.go_back()
    expect(chip).to_be_visible()


def test_a_link_to_a_folded_module_unfolds_it(open_page) -> None:
    page = open_page(make_page(), "#/modules?m=layers.17.feed_forward.w2")
    selected = page.get_by_role("treegrid").locator("[role=row][aria-selected=true]")
    expect(selected).to_be_in_viewport()
    expect(selected).to_contain_text("w2")
    expect(page.get_by_label("selected module")).to_contain_text("17")


def test_a_search_filters_highlights_and_can_be_cleared(open_page) -> None:
    page = open_page(make_page(), "#/modules")
    page.keyboard.press("/")
    page.keyboard.type("layers.17 w2")
    tree = page.get_by_role("treegrid")
    expect(tree.get_by_role("row", name=re.compile("w2"))).to_contain_text("112 MiB")
    expect(tree).to_have_attribute("aria-rowcount", str(1 + 5))
    expect(tree.locator("mark").first).to_have_text("w2")
    page.keyboard.press("Escape")
    expect(tree).to_have_attribute("aria-rowcount", "18")
    page.get_by_role("searchbox").fill("zebra")
    expect(page.get_by_text("No module's path or type has these words.")).to_be_visible()


def test_a_search_in_the_overview_lists_matching_modules(open_page) -> None:
    page = open_page(make_page())
    page.get_by_role("searchbox").fill("attention.wo")
    named = page.get_by_role("region", name="Matching modules (32)")
    expect(named.get_by_role("link", name="and 24 more")).to_be_visible()
    named.get_by_role("link", name="layers.3.attention.wo").click()
    expect(page.get_by_role("tab", name="Modules")).to_have_attribute("aria-selected", "true")
    assert "m=layers.3.attention.wo" in page.url


def test_arrow_keys_move_between_tabs_and_in_the_tree(open_page) -> None:
    page = open_page(make_page())
    page.get_by_role("tab", name="Overview").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Modules")).to_be_focused()
    tree = page.get_by_role("treegrid")
    tree.focus()
    for key in ("Home", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
    layers = tree.get_by_role("row", name=re.compile("layers .*ModuleList"))
    expect(layers).to_have_attribute("aria-expanded", "false")
    page.keyboard.press("ArrowRight")
    expect(layers).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("Enter")
    expect(layers).to_have_attribute("aria-selected", "true")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="keys")).to_have_count(0)
    expect(layers).to_have_attribute("aria-selected", "true")
    page.keyboard.press("3")
    expect(page.get_by_role("tab", name="Communication")).to_have_attribute("aria-selected", "true")


def test_the_theme_follows_the_system_and_can_be_overridden(open_page) -> None:
    def is_dark(page: Page) -> bool:
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", color)[:3])) < 3 * 64

    page = open_page(make_page(), scheme="dark")
    assert is_dark(page)
    page.get_by_role("button", name="Use light colours").click()
    assert not is_dark(page)
    page.reload()
    assert not is_dark(page)


@pytest.mark.parametrize("width", [400, 1280, 3840])
@pytest.mark.parametrize("view", ["overview", "modules"])
def test_nothing_is_wider_than_the_screen(open_page, view: str, width: int) -> None:
    page = open_page(make_page(), f"#/{view}?m=layers.0.attention", width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_hostile_names_are_escaped_and_fit(open_page) -> None:
    page = open_page(make_hostile(), "#/modules", width=400)
    page.on("dialog", lambda dialog: pytest.fail(f"a name ran: {dialog.message}"))
    box = page.get_by_role("treegrid").get_by_role("row").nth(2)
    box.click()
    for view in ("modules", "overview"):
        page.goto(re.sub(r"#/\w+", f"#/{view}", page.url))
        expect(page.locator("body")).to_contain_text("<img src=x")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        assert page.locator("img, #view script").count() == 0


def make_hostile() -> PageRecord:
    page = make_page()
    finding = FindingItem(
        rule=HOSTILE,
        severity="error",
        subject=HOSTILE,
        fact=HOSTILE,
        remedy=HOSTILE,
        module=1,
        source=0,
    )
    tree = ("", HOSTILE, 1, 1, [(HOSTILE, HOSTILE, 1, 1, [])])
    return replace(
        page,
        run=replace(page.run, title=HOSTILE, command=HOSTILE, ranks=HOSTILE),
        facts=(Fact(label=HOSTILE, value=HOSTILE, note=HOSTILE, view="modules"),),
        findings=(finding,),
        gaps=(replace(page.gaps[0], place=HOSTILE, fact=HOSTILE),),
        sources=replace(
            page.sources, file=(HOSTILE,), line=(1,), function=(HOSTILE,), text=(HOSTILE,)
        ),
        modules=lay_out(tree),
        communication=make_communication(tree),
    )


def test_an_empty_page_explains_itself(open_page) -> None:
    full = make_page()
    page = open_page(PageRecord(run=replace(full.run, mesh=(), command="")))
    checks = "No findings (checked by: trace, audit, memory; not run: coverage)."
    expect(page.get_by_text(checks)).to_be_visible()
    expect(page.get_by_text("No gaps: every collective was attributed.")).to_be_visible()
    page.get_by_role("tab", name="Modules").click()
    expect(page.get_by_text("Modules were not recorded.")).to_be_visible()
